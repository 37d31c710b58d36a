"""Calls the ops of the library with arguments at random; a program of its own.

    python random_calls.py CALLS SEED PROGRESS_FILE [FIRST]

Every call starts from arguments that fit and spoils none to three of them. It must
succeed or raise; where it raises, no variable may have changed. The number of the call
that runs is kept in the progress file, for a call that ends the process says nothing;
with CALLS 1 and it as FIRST it runs again.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import json
import os
import sys

import numpy as np
import tensorflow as tf

from tf_basis.ops import loader

DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8")
NUMBERS = (-1, 0, 1, 2, 3, 8, 12, 24, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, -(2**63))
REALS = (float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 1e-45, 1e38, 3.5)
WORDS = ("", "balanced", "double", "none", "shared", "sequential", "nonsense", "\0")


def message_bytes(elements: int, bits: int, block: int) -> int:
    blocks = -(-elements // block)
    rest = elements % block
    return (
        blocks * 4 * bits
        + elements // block * block // 8 * bits
        + (-(-rest * bits // 8))
    )


class Caller:
    """Arguments for every op, good and bad."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.variables: list[tf.Variable] = []

    def pick(self, choices):
        return choices[self.rng.integers(len(choices))]

    # ---- what fits ------------------------------------------------------------

    def variable(self, shape, dtype="float32", most=None):
        value = self.rng.normal(size=shape)
        if most is not None:
            value = self.rng.integers(0, most, shape)
        self.variables.append(tf.Variable(tf.cast(value, dtype)))
        return self.variables[-1].handle

    def floats(self, *shape):
        return tf.constant(self.rng.normal(size=shape), tf.float32)

    def bytes(self, count):
        return tf.constant(self.rng.integers(0, 256, count), tf.uint8)

    def form(self):
        form = {"bits": self.pick((1, 2)), "block": self.pick((8, 16, 24))}
        elements = int(self.pick((0, 1, 7, 16, 40, 77)))
        return form, elements, message_bytes(elements, **form)

    def scales(self, elements, bits, block):
        if self.rng.random() < 0.5:
            return []
        return [self.floats(-(-elements // block) * bits)]

    def mapping(self, n_rows, num_buckets):
        exclusive = int(self.rng.integers(num_buckets))
        owners = exclusive if self.rng.random() < 0.5 else 0
        owner_rows = np.sort(self.rng.permutation(n_rows)[:owners])
        return {
            "owner_rows": tf.constant(owner_rows, tf.int64),
            "owner_buckets": tf.constant(self.rng.permutation(owners), tf.int64),
            "exclusive_rows": exclusive,
            "hashing": self.pick(("balanced", "murmur3", "double", "consistent")),
            "seed": int(self.rng.integers(2**32)),
        }

    def indices(self, n_rows, count):
        return tf.constant(
            self.rng.integers(0, n_rows, count), self.pick((tf.int32, tf.int64))
        )

    def hash_murmur3(self):
        return {"ids": self.indices(2**31, 5), "seed": int(self.rng.integers(2**32))}

    def check_rows(self):
        return {"indices": self.indices(9, 5), "n_rows": 9, "table_name": "t"}

    def map_rows(self):
        n_rows = int(self.rng.integers(2, 50))
        buckets = int(self.rng.integers(1, n_rows + 1))
        sizes = {"n_rows": n_rows, "num_buckets": buckets}
        return {"rows": self.indices(n_rows, 6), **sizes, **self.mapping(**sizes)}

    def count_unusable(self):
        return {"values": self.floats(3, 5), "limit": 1e37}

    def quantize_blocks(self):
        form, elements, _ = self.form()
        cut = int(self.rng.integers(elements + 1))
        momentum = [self.variable(elements)] if self.rng.random() < 0.5 else []
        return {
            "residual": self.variable(elements),
            "values": [self.floats(cut), self.floats(elements - cut)],
            "momentum": momentum,
            "scales": self.scales(elements, **form),
            "keep": 0.9,
            "take": 0.1,
            "clip_value": 0.5,
            **form,
        }

    def average_blocks(self):
        form, elements, length = self.form()
        workers = int(self.rng.integers(1, 4))
        return {
            "residual": self.variable(elements),
            "messages": self.bytes(workers * length),
            "scales": self.scales(elements, **form),
            "workers": workers,
            **form,
        }

    def message_statistics(self):
        form, elements, length = self.form()
        residual = self.variable(elements)
        return {"residual": residual, "message": self.bytes(length), **form}

    def dequantize_blocks(self):
        form, elements, length = self.form()
        count = tf.constant(elements, tf.int64)
        return {"message": self.bytes(length), "elements": count, **form}

    def dequantize_into(self):
        form, elements, length = self.form()
        values = self.variable(elements)
        return {"values": values, "message": self.bytes(length), **form}

    def step(self):
        form, elements, length = self.form()
        half = elements // 2
        scalars = dict.fromkeys(("first_scale", "root_scale", "decay"))
        return (
            length,
            elements,
            {
                "first": self.variable(elements),
                "second": self.variable(elements),
                **{name: tf.constant(0.5) for name in scalars},
                "variables": [self.variable(half), self.variable((elements - half, 1))],
                "starts": [0, half],
                "decayed": [True, False],
                "epsilon": 1e-3,
                **form,
            },
        )

    def step_frozen(self):
        length, _, arguments = self.step()
        return {"message": self.bytes(length), **arguments}

    def step_local(self):
        _, elements, arguments = self.step()
        drift, values = self.variable(elements), [self.floats(elements)]
        extra = {"drift": drift, "values": values, "keep": 0.9, "take": 0.1}
        return {**arguments, **extra, "bits": 1}

    def pack_message(self):
        form, elements, length = self.form()
        with_scales = tf.constant(bool(self.rng.random() < 0.5))
        return {
            "message": self.bytes(2 * length),
            "with_scales": with_scales,
            "elements": [elements, elements],
            **form,
        }

    def unpack_message(self):
        """A message that was packed, at times with a few bytes changed."""
        arguments = self.pack_message()
        if self.rng.random() < 0.5:
            arguments["message"] = tf.zeros_like(arguments["message"])
        library = loader.compiled()
        packed, _, scales = library.tf_basis_pack_message(**arguments)
        packed = packed.numpy()
        for _ in range(self.rng.integers(3) if len(packed) else 0):
            packed[self.rng.integers(len(packed))] = self.rng.integers(256)
        del arguments["message"], arguments["with_scales"]
        return {"packed": tf.constant(packed), "known": scales, **arguments}

    def update_table(self):
        n_rows, dim = (int(x) for x in self.rng.integers(1, 12, 2))
        buckets = int(self.rng.integers(1, n_rows + 1))
        mapping = self.mapping(n_rows, buckets)
        owners = n_rows if buckets == n_rows else mapping["exclusive_rows"]
        momentum = self.pick(("exclusive", "shared", "none"))
        scalar = self.pick(("energy", "learned", "none"))
        rows = {"exclusive": owners, "shared": buckets, "none": 0}[momentum]
        kind = self.pick(("float32", "float32", "bfloat16", "float16"))
        counts = self.indices(n_rows, int(self.rng.integers(20)))

        def some(flag, shape, dtype="float32", most=None):
            return [self.variable(shape, dtype, most)] if flag else []

        scalars = "uint8" if scalar == "energy" and self.rng.random() < 0.3 else kind
        return {
            "table": self.variable((n_rows, dim), kind),
            "bucket_steps": self.variable(buckets, "int32", 9),
            "second_moment": some(scalar == "energy", (buckets, dim), kind),
            "first_moment": some(rows > 0, (rows, dim), kind),
            "row_scalar": some(scalar != "none", n_rows, scalars, 9),
            "row_steps": some(scalar == "learned", n_rows, "int32", 9),
            "last_step": some(self.rng.random() < 0.3, buckets, "int32", 9),
            "leader": [],
            "leader_votes": [],
            "leader_steps": [],
            "indices": counts,
            "values": self.floats(len(counts), dim),
            "learning_rate": tf.constant(0.1, tf.float64),
            "step": tf.constant(10, tf.int64),
            "hyperparameters": tf.constant(self.rng.random(13), tf.float64),
            **mapping,
            "momentum": momentum,
            "invariant_scalar": scalar,
            "bias_correction": True,
        }

    # ---- what does not --------------------------------------------------------

    def spoiled(self, value):
        """Something else of the same kind, or, at times, of another."""
        if self.rng.random() < 0.05:
            value = self.pick((0, 0.0, "", [], None, tf.constant(1)))
        if isinstance(value, list):
            return self.spoiled_list(value)
        if tf.is_tensor(value):
            resource = value.dtype == tf.resource
            return self.handle(value) if resource else self.tensor(value)
        if isinstance(value, bool):
            return self.pick((True, False, 2))
        if isinstance(value, int):
            return self.pick(NUMBERS)
        if isinstance(value, float):
            return self.pick(REALS)
        return self.pick(WORDS) if isinstance(value, str) else value

    def spoiled_list(self, values):
        choice = self.rng.integers(4)
        if choice == 0 or not values:
            return [*values, self.pick((self.variable(3), self.floats(2), 5, -1))]
        at = int(self.rng.integers(len(values)))
        if choice == 1:
            return values[:at] + values[at + 1 :]
        if choice == 2:
            return [*values, values[at]]
        return [*values[:at], self.spoiled(values[at]), *values[at + 1 :]]

    def handle(self, good):
        choice = self.rng.integers(9)
        if choice == 0:
            return tf.stack([good, good])
        if choice == 1 and good.shape.num_elements() == 1:
            return tf.reshape(good, [1])[: self.rng.integers(2)]
        if choice == 2:  # has no value
            return tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[8])
        if choice == 3:  # is no variable
            keys, values = tf.constant([1], tf.int64), tf.constant([2], tf.int64)
            start = tf.lookup.KeyValueTensorInitializer(keys, values)
            return tf.lookup.StaticHashTable(start, 0).resource_handle
        if choice == 4 and self.variables:  # twice, or in the wrong place
            return self.pick(self.variables).handle
        if choice == 5:
            return self.variable((), self.pick(DTYPES), 3)
        if choice == 6:  # is gone
            return tf.Variable(1.0).handle
        shape = [int(x) for x in self.rng.integers(0, 9, self.rng.integers(4))]
        return self.variable(shape, self.pick(DTYPES), 3)

    def tensor(self, good):
        choice = self.rng.integers(6)
        numeric = good.dtype != tf.bool
        if choice == 0:
            return tf.cast(good, self.pick(DTYPES))
        if choice == 1:
            return tf.expand_dims(good, 0)
        if choice == 2 and good.shape.rank:
            return good[: self.rng.integers(len(good) + 1)]
        if choice == 3 and good.shape.rank:
            return tf.concat([good, good], 0)
        array = np.array(good.numpy())
        if not numeric or not array.size:
            return tf.zeros([0], good.dtype)
        real = good.dtype.is_floating
        worst = self.pick(REALS if real else NUMBERS)
        if not real:
            limits = np.iinfo(array.dtype)
            worst = min(max(worst, limits.min), limits.max)
        array.flat[self.rng.integers(array.size)] = worst
        return tf.constant(array)


def bits_of(variables) -> list[bytes]:
    return [v.numpy().tobytes() for v in variables]


def call_at_random(calls: int, seed: int, progress: str, first: int = 0) -> dict:
    """Per op, how many calls gave a result and how many an error."""
    library = loader.compiled()
    prefix = "tf_basis_"
    ops = [n for n in dir(library) if n.startswith(prefix)]
    ops = sorted(n for n in ops if not n.endswith("_eager_fallback"))
    done, refused = collections.Counter(), collections.Counter()
    file = os.open(progress, os.O_WRONLY | os.O_CREAT)
    for number in range(first, first + calls):
        rng = np.random.default_rng([seed, number])
        caller = Caller(rng)
        op = ops[number % len(ops)]
        os.pwrite(file, b"%-20d" % number, 0)
        arguments = getattr(caller, op.removeprefix(prefix))()
        for _ in range(rng.integers(4)):
            name = caller.pick(sorted(arguments))
            # TensorFlow's own ops, too, refuse some of what was spoiled before.
            with contextlib.suppress(tf.errors.OpError):
                arguments[name] = caller.spoiled(arguments[name])
        before = bits_of(caller.variables)
        # Of a bad type of argument Python's part may say anything.
        try:
            getattr(library, op)(**arguments)
        except Exception:
            refused[op] += 1
            assert bits_of(caller.variables) == before, f"call {number} of {op}"
        else:
            done[op] += 1
    os.close(file)
    return {op: [done[op], refused[op]] for op in ops}


if __name__ == "__main__":
    faulthandler.enable()
    calls, seed, path, *start = sys.argv[1:]
    print(json.dumps(call_at_random(int(calls), int(seed), path, *map(int, start))))
