"""Which variables are compressed, into how many buckets, and what that costs."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    TableRun,
    is_compressed,
    keras_of,
    make_optimizer,
    make_slices,
    make_variable,
    optimizer_arrays,
    state_of,
    to_numpy,
    variables_of,
)


def test_default_tables_are_large_embeddings(flavor):
    """tables=None takes rank-2 variables called `embeddings` of min_rows rows."""
    shapes = {"embeddings": (10_000, 2), "kernel": (10_000, 2)}
    optimizer = make_optimizer(flavor)
    variables = [make_variable(np.zeros(s), flavor, n) for n, s in shapes.items()]
    small = make_variable(np.zeros((9_999, 2)), flavor, "embeddings")
    vector = make_variable(np.zeros(20_000), flavor, "embeddings")
    optimizer.build([*variables, small, vector])
    compressed = [is_compressed(optimizer, v) for v in (*variables, small, vector)]
    assert compressed == [True, False, False, False]


def test_min_rows_applies_to_default_tables_only(flavor):
    tables = [make_variable(np.zeros((n, 2)), flavor, "embeddings") for n in (50, 49)]
    optimizer = make_optimizer(flavor, min_rows=50)
    optimizer.build(tables)
    assert [is_compressed(optimizer, v) for v in tables] == [True, False]
    table = make_variable(np.zeros((20, 2)), flavor, "anything")
    optimizer = make_optimizer(flavor, tables=[table], num_buckets=4)
    optimizer.build([table])
    assert is_compressed(optimizer, table)


def test_tables_by_pattern_and_by_path(flavor):
    names = ["user_table", "item_table", "kernel"]
    for tables, expected in (
        ("(user|item)_table", [True, True, False]),
        ("^user", [True, False, False]),
        (["item_table"], [False, True, False]),
    ):
        variables = [make_variable(np.zeros((30, 2)), flavor, n) for n in names]
        optimizer = make_optimizer(flavor, tables=tables, num_buckets=3)
        optimizer.build(variables)
        assert [is_compressed(optimizer, v) for v in variables] == expected


@pytest.mark.parametrize(
    "kwargs, buckets",
    [
        ({"compression_ratio": 100.0}, 11),
        ({"compression_ratio": 7.0}, 150),
        ({"compression_ratio": 1000.0, "exclusive_rows": 5}, 6),
        ({"compression_ratio": 1.0}, 1050),
        ({"compression_ratio": 10.0, "num_buckets": 77}, 77),
        ({"num_buckets": 5000}, 1050),
    ],
)
def test_number_of_buckets(backend, kwargs, buckets):
    """B = max(K + 1, ceil(N / ratio)), at most N; num_buckets overrides."""
    run = TableRun(np.zeros((1050, 2)), **kwargs)
    assert run.state()["second_moment"].shape == (buckets, 2)
    hashed = np.asarray(run.optimizer.buckets(run.variable))
    assert hashed.shape == (1050,) and len(np.unique(hashed)) == buckets


def test_first_moment_is_allocated_for_the_buckets_that_use_it():
    expected = {"shared": 10, "exclusive": 3, "none": None}
    for momentum, rows in expected.items():
        run = TableRun(
            np.zeros((60, 4)), num_buckets=10, exclusive_rows=3, momentum=momentum
        )
        moment = run.state().get("first_moment")
        assert (moment is None) if rows is None else moment.shape == (rows, 4)
        held = [v.shape for v in variables_of(run.optimizer) if len(v.shape) == 2]
        total = 10 + (rows or 0)
        assert sum(shape[0] for shape in held) == total


def test_state_is_at_most_1_4_percent_of_adam(flavor):
    """N/B = 100, d = 64, float32, defaults; measured from the real variables."""
    n_rows = 50_000
    table = make_variable(np.zeros((n_rows, 64)), flavor, "embeddings")
    optimizer, adam = make_optimizer(flavor), keras_of(flavor).optimizers.Adam()
    sizes = []
    for each in (optimizer, adam):
        each.build([table])
        arrays = [to_numpy(v) for v in variables_of(each)]
        sizes.append(sum(a.nbytes for a in arrays if a.ndim))
    assert sizes[1] == 2 * n_rows * 64 * 4
    assert sizes[0] <= 0.014 * sizes[1]
    reported = optimizer.state_bytes()
    path = getattr(table, "path", table.name.removesuffix(":0"))
    layouts = optimizer._basis.fingerprint.numpy().nbytes  # a few numbers a table
    assert layouts <= 200 and reported[path] + layouts == sizes[0]
    assert reported["total"] == sum(v for k, v in reported.items() if k != "total")


@pytest.mark.filterwarnings("ignore:use_ema leaves")
def test_state_bytes_count_averages_and_accumulators(flavor):
    table = make_variable(np.zeros((500, 4)), flavor, "table")
    dense = make_variable(np.zeros((6, 5)), flavor, "dense")
    optimizer = make_optimizer(
        flavor, tables="table", use_ema=True, gradient_accumulation_steps=3
    )
    optimizer.build([table, dense])
    for rows in ([1, 2, 2], [9]):
        slices = make_slices(rows, np.ones((len(rows), 4)), (500, 4))
        optimizer.apply_gradients([(slices, table), (tf.ones((6, 5)), dense)])
    sizes = optimizer.state_bytes()
    assert sizes["averages"] == 6 * 5 * 4
    assert sizes["accumulated_gradients"] == 6 * 5 * 4 + 4 * (4 * 4 + 8)
    counted = [v for v in variables_of(optimizer) if "table_layouts" not in v.name]
    arrays = [to_numpy(v) for v in counted]
    assert sizes["total"] == sum(a.nbytes for a in arrays if a.ndim)


def test_optimizer_has_only_the_state_it_needs():
    """Dense variables get two Adam slots; a table gets no N x d array."""
    table = make_variable(np.zeros((500, 4)), name="table")
    dense = make_variable(np.zeros((6, 5)), name="dense")
    optimizer = make_optimizer(tables=[table], num_buckets=5)
    optimizer.build([table, dense])
    shapes = sorted(a.shape for a in optimizer_arrays(optimizer).values() if a.ndim)
    assert shapes.count((6, 5)) == 2
    assert (500, 4) not in shapes


# ---- scalars of one table -----------------------------------------------------------

SCALARS = {
    "energy": {"scalar_decay": 0.5, "scalar_range": [0.4, 2.0]},
    "learned": {
        "invariant_scalar": "learned",
        "momentum": "shared",
        "scalar_rule": "sign",
        "scalar_learning_rate": 0.01,
        "scalar_frequency_power": 0.5,
    },
    "none": {"invariant_scalar": None},
}


@pytest.mark.parametrize("settings", SCALARS.values(), ids=SCALARS)
def test_scalars_of_one_table_are_those_of_an_optimizer_with_them(
    flavor, backend, settings, rng
):
    """And a table beside it keeps the optimizer's."""
    start = rng.normal(size=(40, 3)).astype(np.float32)
    common = {"num_buckets": 6, "moment_dtype": "float16"}
    own, plain = (TableRun(start, flavor, **common, **s) for s in (settings, {}))
    tables = [make_variable(start, flavor, name) for name in ("first", "other")]
    both = make_optimizer(
        flavor, tables=tables, table_settings={"first": settings}, **common
    )
    both.build(tables)
    for _ in range(4):
        rows, values = rng.integers(0, 40, 15), rng.normal(size=(15, 3))
        own.step(rows, values)
        plain.step(rows, values)
        slices = make_slices(rows, values, (40, 3))
        both.apply_gradients([(slices, table) for table in tables])
    for run, table in zip((own, plain), tables):
        wanted, found = run.state(), state_of(both, table)
        assert wanted.keys() == found.keys()
        for name, value in wanted.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)
    assert not np.array_equal(own.theta, plain.theta)
    kind = settings.get("invariant_scalar", "energy")
    if kind != "energy":  # state of another kind is refused
        with pytest.raises(ValueError, match="invariant_scalar"):
            plain_both = make_optimizer(flavor, tables=tables, **common)
            plain_both.build(tables)
            plain_both._check_fingerprint(both._basis.fingerprint)


def test_scalars_of_one_table_are_checked(flavor):
    def build(kind, settings):
        from tf_basis import optimizers

        table = make_variable(np.zeros((40, 3)), flavor)
        made = getattr(optimizers.for_flavor(flavor), kind)(
            tables=[table], num_buckets=6, table_settings={"table": settings}
        )
        made.build([table])

    for kind, settings, words in (
        ("BasisAdam", {"scalar_range": (2.0, 1.0)}, "scalar_range must be"),
        ("BasisAdam", {"scalar_rule": "no"}, "scalar_rule must be"),
        ("BasisSGD", {"invariant_scalar": "energy"}, "invariant_scalar must be"),
        ("BasisSGD", {"scalar_decay": 0.5}, "may hold"),
        ("BasisAdagrad", {"invariant_scalar": "learned"}, "invariant_scalar must be"),
        (
            "BasisAdam",
            {"invariant_scalar": "learned", "exclusive_rows": "auto"},
            "exclusive_rows must not be 'auto'",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            build(kind, settings)
    with pytest.warns(UserWarning, match="keep their scalar at 1"):
        build("BasisAdam", {"invariant_scalar": "learned"})
