"""State of another table layout: refused with both values, or moved when asked."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from export_helpers import arrays_of, train
from growth_helpers import BUCKET_SLOTS, Table, mixed_by_hand
from helpers import assert_same_bits, make_click_model, make_optimizer, state_of

import tf_basis
from tf_basis import layout_record, restore_tables, transfer

BASE = {"learning_rate": 0.02, "exclusive_rows": 40}


def make_model(**arguments):
    return make_click_model(make_optimizer(**{**BASE, **arguments}), run_eagerly=True)


def table_of(model):
    (table,) = [v for v in model.trainable_variables if v.shape[0] == 12_000]
    return table


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    model = train(make_model(), 0, 3)
    path = tmp_path_factory.mktemp("migrate") / "export"
    tf_basis.export_saved_model(model, path)
    return model, path


# Arguments -> the words of the refusal.
OTHERS = {
    "buckets": ({"num_buckets": 300}, "buckets 300 here, 120 there"),
    "seed": ({"seed": 3}, "seed 3 here, 0 there"),
    "hashing": ({"hashing": "double"}, "hashing 'double' here, 'balanced' there"),
    "owners": ({"exclusive_rows": [5, 90]}, r"exclusive_rows \[5, 90\] here, 40 there"),
    "format": (
        {"moment_dtype": "bfloat16", "energy_dtype": "log8"},
        "moment_dtype 'bfloat16' here, 'float32' there; energy_dtype 'log8' here",
    ),
    "all": ({"num_buckets": 12_000}, "buckets 12000 here, 120 there"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_layouts_are_refused_or_moved(name, exported):
    model, path = exported
    arguments, words = OTHERS[name]
    other = make_model(**arguments)
    other.optimizer.build(other.trainable_variables)
    before = arrays_of(other)
    with pytest.raises(ValueError, match=f"migrate=True be given: .*{words}"):
        tf_basis.restore_optimizer(other, path)
    assert_same_bits(before, arrays_of(other))
    tf_basis.restore_optimizer(other, path, migrate=True)
    assert int(tf.convert_to_tensor(other.optimizer.iterations)) == 3
    mine, theirs = (state_of(m.optimizer, table_of(m)) for m in (other, model))
    assert_same_bits({"": mine["theta"]}, {"": theirs["theta"]})
    assert mine["second_moment"].any() and np.isfinite(mine["second_moment"]).all()
    if name in ("buckets", "all"):  # as `resize` does it
        resized = make_model()
        tf_basis.restore_optimizer(resized, path)
        size = arguments["num_buckets"]
        resized.optimizer.resize(table_of(resized), num_buckets=size)
        expected = state_of(resized.optimizer, table_of(resized))
        assert_same_bits(mine, expected)
        assert_same_bits(arrays_of(resized), arrays_of(other))
    elif name == "seed":
        assert_same_bits({"": mine["row_energy"]}, {"": theirs["row_energy"]})
        own = mine["second_moment"][:40]
        assert_same_bits({"": own}, {"": theirs["second_moment"][:40]})
    train(other, 3, 4)
    assert not np.array_equal(state_of(other.optimizer, table_of(other))["theta"], mine)


@pytest.mark.filterwarnings("ignore:invariant_scalar='learned'")
def test_what_no_migration_can_change(exported):
    _, path = exported
    for arguments, words in [
        ({"momentum": "shared"}, "momentum 'shared' here, 'exclusive' there"),
        ({"exclusive_rows": "auto"}, "exclusive_rows 'auto' here, 40 there"),
    ]:
        with pytest.raises(ValueError, match=f"migrate=True cannot change .*{words}"):
            tf_basis.restore_optimizer(make_model(**arguments), path, migrate=True)
    for scalar in ("learned", None):
        other = make_model(invariant_scalar=scalar)
        with pytest.raises(ValueError, match="row_energy"):
            tf_basis.restore_optimizer(other, path, migrate=True)


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("adam-shared", {"seed": 7}),
        ("adam-shared", {"hashing": "murmur3"}),
        ("adam-shared", {"hashing": "double"}),
        ("adam-double", {"hashing": "balanced"}),
        ("adam-leading", {"hashing": "consistent", "num_buckets": 20}),
        ("adam-stale", {"seed": 7, "num_buckets": 24}),
        ("sgd", {"seed": 1}),
        ("adagrad", {"hashing": "murmur3", "num_buckets": 24}),
    ],
    ids=str,
)
def test_moments_are_averaged_over_the_rows(case, changes, flavor):
    """Another hash: as written in `move_buckets`, against loops over the rows."""
    old = Table(case, 12, flavor).train(6)
    changes = {"num_buckets": 12, **changes}
    if "seed" in changes:  # of the hash, not of the table's values
        changes["table_settings"] = {"": {"seed": changes.pop("seed")}}
    new = Table(case, **changes, flavor=flavor)
    state = old.state()
    (record,) = restore_tables.export_manifest.layouts_of(old.optimizer)
    slots = old.optimizer._basis.slots[next(iter(old.optimizer._basis.slots))]
    stored = {n: tf.convert_to_tensor(s).numpy() for n, s in slots.items()}
    values = restore_tables.moved_values(
        new.optimizer, 0, record, stored, old.iterations()
    )
    for variable, value in values:
        variable.assign(value)
    found = new.state()
    for name in set(found) - BUCKET_SLOTS - {"theta"}:
        assert_same_bits({"": found[name]}, {"": state[name]})
    expected = mixed_across_hashes(old, state, new)
    assert expected["bucket_steps"]
    for name, buckets in expected.items():
        for bucket, value in buckets.items():
            np.testing.assert_allclose(
                found[name][bucket], value, rtol=1e-5, atol=1e-9, err_msg=name
            )
    new.train(2)


def mixed_across_hashes(old: Table, state: dict, new: Table) -> dict:
    """`mixed_by_hand`, with a row's one bucket listed twice where the other has two."""
    before, after = old.buckets, new.buckets
    width = max(before.shape[1], after.shape[1])
    wide = [np.tile(b, (1, width // b.shape[1])) for b in (before, after)]
    return mixed_by_hand(old, state, *wide)


def test_another_hash_is_no_split():
    """A bucket inherits another one's state only where all of its rows come from it."""
    table = Table("adam-shared", 12).train(4)
    layout = next(iter(table.optimizer._basis.layouts.values()))
    other = layout_record.layout_of({**layout_record.record_of(layout), "seed": 1})
    assert transfer._splits(layout, layout) and not transfer._splits(layout, other)
    assert layout_record.layout_of(layout_record.record_of(layout)) == layout
