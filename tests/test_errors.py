"""Errors name the argument, the rule and the value received."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import tensorflow as tf
from helpers import active_flavor, make_optimizer, make_variable, run_python

import tf_basis
from tf_basis import hashing

BAD_ARGUMENTS = [
    ("beta_1", 1.0),
    ("beta_1", -0.1),
    ("beta_2", 1.0),
    ("beta_2", 1.5),
    ("beta_2", float("nan")),
    ("epsilon", -1.0),
    ("compression_ratio", 0.5),
    ("compression_ratio", 0),
    ("compression_ratio", "many"),
    ("num_buckets", 0),
    ("num_buckets", -3),
    ("num_buckets", 2.5),
    ("exclusive_rows", -1),
    ("exclusive_rows", 1.5),
    ("min_rows", -1),
    ("momentum", "nesterov"),
    ("momentum", None),
    ("invariant_scalar", "magic"),
    ("scalar_rule", "cosine"),
    ("scalar_decay", 1.5),
    ("scalar_decay", -0.5),
    ("scalar_range", (2.0, 1.0)),
    ("scalar_range", (-1.0, 1.0)),
    ("scalar_range", 3.0),
    ("scalar_learning_rate", -0.25),
    ("collision_reduce", "max"),
    ("bias_correction", "yes"),
    ("hashing", "md5"),
    ("seed", -1),
    ("seed", 2**32),
    ("seed", 0.5),
    ("weight_decay", -0.25),
    ("row_clipnorm", 0.0),
    ("row_clipnorm", -1.0),
    ("tables", 17),
    ("tables", "(unclosed"),
    ("tables", [3]),
    ("dense_optimizer", "no_such_optimizer"),
    ("dense_optimizer", 17),
]


@pytest.mark.parametrize(
    "name, value", BAD_ARGUMENTS, ids=lambda v: str(v).replace(" ", "")
)
def test_bad_argument(flavor, name, value):
    with pytest.raises((ValueError, TypeError)) as error:
        make_optimizer(flavor, **{name: value})
    message = str(error.value)
    assert name in message
    shown = value[0] if isinstance(value, list | tuple) else value
    assert str(shown) in message


@pytest.mark.parametrize("argument", ["no_such_argument"])
def test_unknown_argument(flavor, argument):
    with pytest.raises((TypeError, ValueError), match=argument):
        make_optimizer(flavor, **{argument: 1})


def build(flavor, rows=50, **kwargs):
    table = make_variable(np.zeros((rows, 2)), flavor, "user_table")
    dense = make_variable(np.zeros((4,)), flavor, "bias")
    kwargs.setdefault("tables", [table])
    optimizer = make_optimizer(flavor, **kwargs)
    optimizer.build([table, dense])
    return optimizer, table, dense


def test_exclusive_rows_must_leave_a_shared_bucket(flavor):
    for exclusive in (10, 11):
        with pytest.raises(ValueError, match="exclusive_rows") as error:
            build(flavor, num_buckets=10, exclusive_rows=exclusive)
        for part in ("num_buckets", "10", str(exclusive)):
            assert part in str(error.value)
    build(flavor, num_buckets=10, exclusive_rows=9)
    build(flavor, num_buckets=50, exclusive_rows=50)


@pytest.mark.parametrize("tables", ["no_such_name", ["no_such_name"]])
def test_tables_that_match_nothing(flavor, tables):
    with pytest.raises(ValueError, match="tables") as error:
        build(flavor, tables=tables)
    assert "no_such_name" in str(error.value)
    # The message helps: it says which variables there are.
    assert "user_table" in str(error.value)


def test_tables_must_have_rank_two(flavor):
    with pytest.raises(ValueError, match="bias") as error:
        build(flavor, tables=["bias"])
    assert "tables" in str(error.value)


def test_state_of_a_variable_that_is_not_compressed(flavor):
    optimizer, _, dense = build(flavor, num_buckets=10)
    for method in (optimizer.table_state, optimizer.buckets):
        with pytest.raises(ValueError, match="bias"):
            method(dense)


def test_state_before_the_optimizer_is_built(flavor):
    table = make_variable(np.zeros((50, 2)), flavor, "user_table")
    optimizer = make_optimizer(flavor, tables=[table])
    for method in (optimizer.table_state, optimizer.buckets):
        with pytest.raises(ValueError, match="build"):
            method(table)


def test_learned_scalar_with_exclusive_momentum_warns(flavor):
    """Only owner rows learn in this combination, so it is hardly meant."""
    with pytest.warns(UserWarning, match="momentum"):
        make_optimizer(flavor, invariant_scalar="learned")


def test_dense_optimizer_of_the_other_flavor():
    import keras
    import tf_keras

    for flavor, other in (("keras3", tf_keras), ("tf_keras", keras)):
        with pytest.raises((ValueError, TypeError), match="dense_optimizer"):
            make_optimizer(flavor, dense_optimizer=other.optimizers.SGD())


@pytest.mark.parametrize(
    "kwargs, name, value",
    [
        ({"num_buckets": 0}, "num_buckets", "0"),
        ({"n_rows": 0}, "n_rows", "0"),
        ({"exclusive_rows": -1}, "exclusive_rows", "-1"),
        ({"exclusive_rows": 5}, "exclusive_rows", "5"),
        ({"hashing": "md5"}, "hashing", "md5"),
        ({"seed": -1}, "seed", "-1"),
        ({"seed": 2**32}, "seed", str(2**32)),
    ],
)
def test_bad_hashing_arguments(kwargs, name, value):
    arguments = {"n_rows": 50, "num_buckets": 5, **kwargs}
    with pytest.raises(ValueError, match=name) as error:
        hashing.bucket_of_rows(np.arange(3), **arguments)
    assert value in str(error.value)


def test_ids_must_be_integers():
    for call in (
        lambda: hashing.murmur3_x86_32(np.array([0.5]), 0),
        lambda: hashing.bucket_of_rows(np.array([0.5]), 50, 5),
    ):
        with pytest.raises((TypeError, ValueError), match="float64"):
            call()


@pytest.mark.parametrize("value", ["sometimes", ""])
def test_bad_ops_mode(value):
    from tf_basis.ops import loader

    with pytest.raises(ValueError) as error:
        loader.set_mode(value)
    for part in ("auto", "off", "require", repr(value)):
        assert part in str(error.value)


def test_bad_ops_mode_in_the_environment():
    source = "from tf_basis.ops import loader; loader.compiled()"
    result = run_python(source, check=False, TF_BASIS_OPS="sometimes")
    assert result.returncode != 0
    for part in ("TF_BASIS_OPS", "auto", "off", "require", "sometimes"):
        assert part in result.stderr


def test_import_works_with_ops_off_and_mode_is_restored():
    from tf_basis.ops import loader

    before = loader.get_mode()
    with loader.use("off"):
        assert loader.get_mode() == "off" and loader.compiled() is None
    assert loader.get_mode() == before


@pytest.mark.skipif(active_flavor() != "keras3", reason="tf_keras has one backend")
@pytest.mark.parametrize("name", ["jax", "numpy"])
def test_other_keras_backends_are_an_error(name):
    source = "import tf_basis; tf_basis.BasisAdam()"
    result = run_python(source, check=False, KERAS_BACKEND=name)
    assert result.returncode != 0
    message = result.stderr.strip().splitlines()[-1]
    for part in ("KERAS_BACKEND", "tensorflow", name):
        assert part in message


# ---- settings that only the tables can decide -----------------------------


def quiet_build(flavor, **kwargs):
    """`build`; every warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return build(flavor, **kwargs)


def test_table_settings_that_match_nothing(flavor):
    settings = {"user": {"num_buckets": 5}, "no_such_name": {"num_buckets": 5}}
    with pytest.raises(ValueError, match="table_settings") as error:
        build(flavor, table_settings=settings)
    assert "no_such_name" in str(error.value) and "user_table" in str(error.value)
    del settings["no_such_name"]
    quiet_build(flavor, table_settings=settings)


def test_sizes_above_every_table_warn(flavor):
    for name in ("num_buckets", "exclusive_rows"):
        for value, where in ((51, {}), (5, {"user": {name: 51}})):
            with pytest.warns(UserWarning, match=f"{name}=51 .*50 rows"):
                build(flavor, table_settings=where, **{name: value})
        quiet_build(flavor, **{name: 50})
    # One size for all tables may be above some.
    variables = [make_variable(np.zeros((n, 2)), flavor, f"t{n}") for n in (50, 900)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = make_optimizer(flavor, tables="^t", num_buckets=60)
        optimizer.build(variables)
    sizes = [len(optimizer.table_state(v)["bucket_steps"]) for v in variables]
    assert sizes == [50, 60]


def test_a_ratio_that_a_count_outranks_warns(flavor):
    arguments = {"num_buckets": 5, "compression_ratio": 7}
    with pytest.warns(UserWarning, match="compression_ratio=7 has no effect"):
        make_optimizer(flavor, **arguments)
    with pytest.warns(UserWarning, match="compression_ratio=7 has no effect"):
        make_optimizer(flavor, table_settings={"x": arguments})
    # The other table's setting, and what a config always holds, are no news.
    settings = {"user": {"compression_ratio": 7}}
    optimizer, *_ = quiet_build(flavor, num_buckets=5, table_settings=settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        type(optimizer).from_config(optimizer.get_config())


@pytest.mark.parametrize("exclusive", [0, 3])
def test_row_frequencies_must_fit_the_table(flavor, exclusive):
    for count in (49, 51):
        numbers = {"row_frequencies": np.ones(count), "exclusive_rows": exclusive}
        for arguments in (numbers, {"table_settings": {"user": numbers}}):
            with pytest.raises(ValueError, match="row_frequencies") as error:
                build(flavor, num_buckets=10, **arguments)
            for part in ("50", str(count), "user_table"):
                assert part in str(error.value)
    ones = np.ones(50)
    build(flavor, num_buckets=10, row_frequencies=ones, exclusive_rows=exclusive)
    # A table with owners of its own does not look at them.
    own = {"user": {"exclusive_rows": [4]}}
    build(flavor, num_buckets=10, row_frequencies=np.ones(3), table_settings=own)


def test_row_frequencies_with_auto(flavor):
    with pytest.raises(ValueError, match="row_frequencies must be None") as error:
        make_optimizer(flavor, row_frequencies=[1, 2], exclusive_rows="auto")
    assert "exclusive_rows='auto'" in str(error.value)


def test_a_numpy_number_of_exclusive_rows(flavor):
    optimizer, table, _ = build(flavor, num_buckets=9, exclusive_rows=np.int64(4))
    assert len(optimizer.table_state(table)["first_moment"]) == 4
    assert optimizer.get_config()["exclusive_rows"] == 4


def test_large_variables_of_another_name_warn_once(flavor):
    shapes = {
        "user_table": (10_000, 4),  # a table
        "dense/kernel": (10_000, 4),  # a wide one-hot input looks the same
        "item/embeddings": (10_000, 4),
        "small": (9_999, 4),
        "square": (10_000, 400),
        "long": (10_000,),
    }

    def variables():
        # Made by hand: a Keras layer would give them its own path.
        return [tf.Variable(np.zeros(s, np.float32), name=n) for n, s in shapes.items()]

    with pytest.warns(UserWarning, match="tables=") as caught:
        make_optimizer(flavor).build(variables())
    (warning,) = [w for w in caught if "tables=" in str(w.message)]
    assert "'user_table' (10000, 4)" in str(warning.message)
    for name in ("kernel", "item", "small", "square", "long"):
        assert name not in str(warning.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_optimizer(flavor, tables=[]).build(variables())
        make_optimizer(flavor, tables="user").build(variables())
        make_optimizer(flavor, min_rows=10_001).build(variables())


# ---- arguments of methods and functions ----------------------------------


@pytest.mark.parametrize("value", [None, 3, ["user_table"], np.zeros((50, 2))])
def test_methods_want_a_variable(flavor, value):
    optimizer, table, _ = build(flavor, num_buckets=10)
    calls = {
        "variable": [
            lambda: optimizer.table_state(value),
            lambda: optimizer.buckets(value),
            lambda: optimizer.resize(value, num_buckets=20),
        ],
        "old_variable": [lambda: optimizer.grow_rows(value, table)],
        "new_variable": [lambda: optimizer.grow_rows(table, value)],
    }
    for name, of_name in calls.items():
        for call in of_name:
            with pytest.raises(ValueError, match=f"^{name} must be") as error:
                call()
            assert repr(value) in str(error.value)


@pytest.mark.parametrize("value", [3, None, "model"])
def test_retrace_wants_a_model(value):
    with pytest.raises(ValueError, match=r"model must be .*received") as error:
        tf_basis.retrace(value)
    assert repr(value) in str(error.value)


@pytest.mark.parametrize("value", [None, 0, "many"])
def test_a_number_of_buckets_is_not_optional_here(value):
    for call in (
        lambda: hashing.bucket_of_rows([0], 10, value),
        lambda: hashing.load_statistics([0], value),
    ):
        with pytest.raises(ValueError, match="num_buckets must be an integer") as error:
            call()
        assert repr(value) in str(error.value)


def test_an_unknown_argument_names_the_optimizer(flavor):
    kinds = tf_basis.optimizers.for_flavor(flavor)
    with pytest.raises(TypeError, match="beta_1 must not be given") as error:
        kinds.BasisAdagrad(beta_1=0.9)
    for part in ("BasisAdagrad", "initial_accumulator_value", "clipnorm", "0.9"):
        assert part in str(error.value)
