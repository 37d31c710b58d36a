"""Errors name the argument, the rule and the value received."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import active_flavor, make_optimizer, make_variable, run_python

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
    source = "from tf_basis.ops import loader; loader.library()"
    result = run_python(source, check=False, TF_BASIS_OPS="sometimes")
    assert result.returncode != 0
    for part in ("TF_BASIS_OPS", "auto", "off", "require", "sometimes"):
        assert part in result.stderr


def test_import_works_with_ops_off_and_mode_is_restored():
    from tf_basis.ops import loader

    before = loader.get_mode()
    with loader.use("off"):
        assert loader.get_mode() == "off" and loader.library() is None
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
