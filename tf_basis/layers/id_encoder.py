"""The layer that turns strings or integers into rows of a table."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import tensorflow as tf

from tf_basis import hyperparameters
from tf_basis.adapters import flavor, keras_modules
from tf_basis.layers import id_counts

_RULES = {
    "id_dtype": hyperparameters.choice(*id_counts.ID_DTYPES),
    "min_count": hyperparameters.count,
    "max_size": hyperparameters.integer("of at least 1", lambda v: v >= 1, True),
    "num_oov": hyperparameters.integer("of at least 0", lambda v: v >= 0),
    "hash_rows": hyperparameters.integer("of at least 1", lambda v: v >= 1, True),
}
_OF_THE_VOCABULARY = {"min_count": 1, "max_size": None, "num_oov": 1}
_MASK_TOKENS = {
    "string": hyperparameters.Rule(
        "None or a string with id_dtype='string'",
        lambda v: v is None or isinstance(v, str),
    ),
    "int64": hyperparameters.integer(
        "of 64 bits with id_dtype='int64'", lambda v: -(2**63) <= v < 2**63, True
    ),
}


class IdEncoderMixin:
    """Strings or integers to rows: those of a vocabulary, others hashed.

    `adapt` counts ids and gives them rows, the most frequent one the first::

        row    0                    of `mask_token`, where there is one
               the next `num_oov`   of ids outside of the vocabulary, by their hash
               the others           of the vocabulary, by frequency; equal ones by id

    What is not in the vocabulary comes first, so that a vocabulary can grow behind it:
    a later `adapt` leaves every row where it is and appends new ids, again by
    frequency; `EmbeddingCollection.grow` gives the table the new rows. So the k most
    frequent ids are not quite the first rows: `exclusive_rows(k)` counts those before
    them too.

    With `hash_rows` there is no vocabulary, and nothing to adapt: each id is hashed to
    one of that many rows, as Keras's `Hashing` does.

    Ids come as tensors or arrays of any rank, `tf.RaggedTensor` or `tf.SparseTensor`,
    and rows are int64 in the same form; inside a model or `tf.data.Dataset.map`.
    Functions that were traced before an `adapt` need not be traced again. The files of
    `model.save` and `save_weights` and `tf.train.Checkpoint` hold vocabulary and
    counts; only tf_keras's `.h5` does not.

    Args:
      id_dtype: `"string"` (default), or `"int64"` for integers of any type but uint64.
      min_count: how often an id must occur in one `adapt` to enter the vocabulary.
        Default 1: then no id of the data is outside of it, and the rows of those that
        are keep their initial values in training. 2 gives them the rare ids' to learn.
      max_size: how many ids the vocabulary may hold. Default None: any number.
      num_oov: rows for ids outside of the vocabulary. With 0 they are an error.
        Default 1.
      mask_token: the id that stands for none, as padding: it has row 0, and is not
        counted. Default None.
      hash_rows: rows without a vocabulary; the three above keep their defaults then.
        Default None.
      **kwargs: of the Keras layer.

    Raises:
      ValueError: an argument breaks its rule; in a call: ids are of another type; there
        is no vocabulary yet (when called eagerly). The message names the layer.
      tf.errors.InvalidArgumentError: there is no vocabulary yet (in a graph); an id is
        outside of it with `num_oov=0`. The message names the layer.

    Example:

    >>> encoder = IdEncoder(num_oov=2, mask_token="")
    >>> encoder.adapt([["pear", "fig", "pear"], ["", "kiwi", "pear"]])
    >>> encoder(tf.constant(["", "pear", "fig", "kiwi"])).numpy().tolist()
    [0, 3, 4, 5]
    >>> encoder.row_frequencies().tolist()
    [0, 0, 0, 3, 1, 1]
    >>> encoder.adapt(["lime", "pear"])
    >>> encoder(tf.ragged.constant([["lime"], [], ["fig", "pear"]])).to_list()
    [[6], [], [4, 3]]
    >>> own = encoder.exclusive_rows(2)  # and the rows before "pear" and "fig"
    >>> TableConfig("fruit", encoder.num_rows, 16, exclusive_rows=own).settings()
    {'exclusive_rows': 5}

    Reference: Keras's `StringLookup`, `IntegerLookup` and `Hashing`. The former forget
    counts and rows in each `adapt`, and are not part of a model's weights.
    """

    def __init__(
        self,
        id_dtype: str = "string",
        *,
        min_count: int = 1,
        max_size: int | None = None,
        num_oov: int = 1,
        mask_token: Any = None,
        hash_rows: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        arguments = {
            "id_dtype": id_dtype,
            "min_count": min_count,
            "max_size": max_size,
            "num_oov": num_oov,
            "hash_rows": hash_rows,
        }
        hyperparameters.check_all(arguments, _RULES)
        hyperparameters.check("mask_token", mask_token, _MASK_TOKENS[id_dtype])
        for name, default in _OF_THE_VOCABULARY.items():
            if hash_rows is not None and arguments[name] != default:
                raise ValueError(
                    f"{name} must be {default} with hash_rows, which has no "
                    f"vocabulary, received {arguments[name]!r}"
                )
        self._arguments = {**arguments, "mask_token": mask_token}
        # What Keras 3's own lookup layers set: ids are not numbers to compute with.
        self._convert_input_args = False
        self._allow_non_tensor_positional_args = True
        self.supports_jit = False
        hashed = num_oov if hash_rows is None else hash_rows
        layers = keras_modules.keras_of(self._flavor).layers
        self._hashing = layers.Hashing(hashed) if hashed > 1 else None
        tables = tf.lookup.experimental
        with tf.device("CPU:0"), tf.init_scope():
            self._rows = tables.MutableHashTable(id_dtype, tf.int64, -1)
            self._counts = tables.MutableHashTable(tf.int64, tf.int64, 0)  # by row

    @property
    def num_rows(self) -> int:
        """The rows that a table for these ids needs."""
        return self._first_row() + int(self._rows.size())

    def vocabulary(self) -> np.ndarray:
        """The ids with a row of their own, in the order of rows; strings as bytes."""
        ids, rows = self._rows.export()
        return ids.numpy()[np.argsort(rows.numpy())]

    def row_frequencies(self) -> np.ndarray:
        """How often `adapt` has seen each row, int64, shape [num_rows].

        For `TableConfig(row_frequencies=...)`, whose `exclusive_rows` are then the most
        frequent rows of all, among them rows of hashed ids.
        """
        return self._counts.lookup(tf.range(self.num_rows, dtype=tf.int64)).numpy()

    def exclusive_rows(self, k: int) -> int:
        """The leading rows up to the k-th id of the vocabulary.

        For `TableConfig(exclusive_rows=...)`: the k most frequent ids of the first
        `adapt`, the rows of ids outside of the vocabulary and that of the mask.

        Raises:
          ValueError: there are less than k ids.
        """
        size = int(self._rows.size())
        rule = hyperparameters.integer(
            f"in [0, {size}], the ids of '{self.name}'", lambda v: 0 <= v <= size
        )
        hyperparameters.check("k", k, rule)
        return self._first_row() + int(k)

    def adapt(self, dataset: Any) -> None:
        """Counts ids, and appends those that are new to the vocabulary.

        One pass, which holds the different ids of the data in memory. `min_count` is of
        this data alone; what does not enter the vocabulary is counted for the row that
        it is hashed to. With `hash_rows` rows are counted, and nothing else.

        Args:
          dataset: ids in any form that a call takes, or lists, also of different
            lengths; or a finite `tf.data.Dataset` of such tensors, batched or not.

        Raises:
          ValueError: it holds no ids, or some of another type; or no id occurs
            `min_count` times and there is no vocabulary yet. Nothing has changed then.
          RuntimeError: it is called inside a tf.function.
        """
        if not tf.executing_eagerly():
            raise RuntimeError(
                f"adapt of '{self.name}' must be called eagerly, not inside a "
                "tf.function or graph"
            )
        own, what = self._arguments, f"dataset of '{self.name}'"
        dataset = id_counts.as_dataset(dataset, own["id_dtype"], what)
        hashed = own["hash_rows"] is not None

        def keys_of(ids: tf.Tensor) -> tf.Tensor:
            ids = id_counts.typed(ids, own["id_dtype"], what)
            if own["mask_token"] is not None:
                ids = tf.boolean_mask(ids, ids != own["mask_token"])
            return self._hashed(ids) if hashed else ids

        dtype = "int64" if hashed else own["id_dtype"]
        keys, counts = id_counts.count(dataset, dtype, keys_of)
        if not len(keys):
            raise ValueError(f"{what} must hold ids, received none")
        if hashed:
            self._add_counts(keys, counts)
            return
        rows = self._rows.lookup(tf.constant(keys)).numpy()
        new = np.flatnonzero((rows < 0) & (counts >= own["min_count"]))
        new = new[id_counts.most_frequent_first(keys[new], counts[new])]
        size = int(self._rows.size())
        if own["max_size"] is not None:
            new = new[: max(own["max_size"] - size, 0)]
        if not size and not len(new):
            raise ValueError(
                f"min_count must be reached by an id of the {what}, received "
                f"{own['min_count']} where the most frequent one occurs {counts.max()} "
                "times"
            )
        rows[new] = self._first_row() + size + np.arange(len(new))
        if len(new):
            self._rows.insert(tf.constant(keys[new]), rows[new])
        if own["num_oov"]:
            outside = rows < 0
            rows[outside] = self._hashed(tf.constant(keys[outside], own["id_dtype"]))
        self._add_counts(rows[rows >= 0], counts[rows >= 0])

    def build(self, input_shape: Any = None) -> None:
        """There are no weights to make."""
        del input_shape
        self.built = True

    def call(self, inputs: Any) -> Any:
        """The rows of ids, in their form."""
        ids = id_counts.as_tensor(inputs, f"ids of '{self.name}'")
        with tf.device("CPU:0"):
            if isinstance(ids, tf.SparseTensor):
                rows = self._rows_of(ids.values)
                return tf.SparseTensor(ids.indices, rows, ids.dense_shape)
            if isinstance(ids, tf.RaggedTensor):
                return ids.with_flat_values(self._rows_of(ids.flat_values))
            return self._rows_of(ids)

    def get_config(self) -> dict[str, Any]:
        """The arguments, ready for JSON; not the vocabulary."""
        return {**super().get_config(), **self._arguments}

    def save_own_variables(self, store: Any) -> None:
        """Keras calls it."""
        ids = self.vocabulary()
        for name, value in id_counts.packed(ids).items():
            store[name] = value
        store["counts"] = self.row_frequencies()

    def load_own_variables(self, store: Any) -> None:
        """Keras calls it."""
        what = f"vocabulary of '{self.name}'"
        ids, counts = id_counts.unpacked(store, what), np.asarray(store["counts"])
        rows = self._first_row() + np.arange(len(ids))
        kinds = [(object if self._arguments["id_dtype"] == "string" else np.int64)]
        if ids.dtype not in kinds or len(counts) != self._first_row() + len(ids):
            raise ValueError(
                f"{what} must be stored by an encoder with the arguments "
                f"{self._arguments}, received {len(ids)} ids of type {ids.dtype} in "
                f"{len(counts)} rows"
            )
        for table in (self._rows, self._counts):
            table.remove(table.export()[0])
        if len(ids):
            self._rows.insert(tf.constant(ids), rows)
        self._add_counts(np.arange(len(counts)), counts)

    def _first_row(self) -> int:
        """The first row that is not hashed to."""
        own = self._arguments
        hashed = own["num_oov"] if own["hash_rows"] is None else own["hash_rows"]
        return self._masks() + hashed

    def _masks(self) -> int:
        return int(self._arguments["mask_token"] is not None)

    def _hashed(self, ids: tf.Tensor) -> tf.Tensor:
        """The rows of ids that are in no vocabulary."""
        start = tf.constant(self._masks(), tf.int64)
        if self._hashing is None:
            return tf.fill(tf.shape(ids), start)
        return start + tf.cast(self._hashing.call(ids), tf.int64)

    def _rows_of(self, ids: tf.Tensor) -> tf.Tensor:
        own, what = self._arguments, f"ids of '{self.name}'"
        ids = id_counts.typed(ids, own["id_dtype"], what)
        masked = tf.zeros_like(ids, tf.bool)
        if own["mask_token"] is not None:
            masked = tf.equal(ids, own["mask_token"])
        if own["hash_rows"] is not None:
            rows = self._hashed(ids)
        else:
            rows = self._known_rows(ids, masked)
        return tf.where(masked, tf.zeros_like(rows), rows)

    def _known_rows(self, ids: tf.Tensor, masked: tf.Tensor) -> tf.Tensor:
        words = f"'{self.name}' has no vocabulary: call its adapt first, or load it"
        if tf.executing_eagerly() and not int(self._rows.size()):
            raise ValueError(words)
        adapted = tf.debugging.Assert(self._rows.size() > 0, [words])
        with tf.control_dependencies([] if adapted is None else [adapted]):
            rows = tf.ensure_shape(self._rows.lookup(ids), ids.shape)
        outside = (rows < 0) & ~masked
        if self._arguments["num_oov"]:
            return tf.where(outside, self._hashed(ids), rows)
        words = (
            f"ids of '{self.name}' must be in its vocabulary with num_oov=0, received"
        )
        flat = [tf.reshape(x, [-1]) for x in (ids, outside)]  # no mask is a scalar
        unknown = tf.boolean_mask(*flat)[:8]
        known = tf.debugging.Assert(tf.size(unknown) == 0, [words, unknown])
        with tf.control_dependencies([] if known is None else [known]):
            return tf.identity(rows)

    def _add_counts(self, rows: np.ndarray, counts: np.ndarray) -> None:
        different, places = np.unique(rows, return_inverse=True)
        total = self._counts.lookup(tf.constant(different, tf.int64)).numpy()
        np.add.at(total, places, counts)
        self._counts.insert(tf.constant(different, tf.int64), total)


class _OnKeras3:
    """Keras 3 would look at a call to know its output."""

    def compute_output_spec(self, inputs: Any) -> Any:
        """Of the form and shape of the ids."""
        own, what = self._arguments, f"ids of '{self.name}'"
        id_counts.check_dtype(inputs.dtype, own["id_dtype"], what)
        kinds = {k: getattr(inputs, k, False) for k in ("sparse", "ragged")}
        keras = keras_modules.keras_of(self._flavor)
        return keras.KerasTensor(inputs.shape, "int64", **kinds)


@functools.cache
def for_flavor(name: str) -> SimpleNamespace:
    """The encoder on one flavour of Keras: `"keras3"` or `"tf_keras"`."""
    base = keras_modules.keras_of(name).layers.Layer
    own = (_OnKeras3,) if name == "keras3" else ()
    members = {
        "__doc__": IdEncoderMixin.__doc__,
        "__module__": __name__,
        "_flavor": name,
    }
    made = type("IdEncoder", (*own, IdEncoderMixin, base), members)
    return SimpleNamespace(IdEncoder=flavor.load_adapter(name).register(made))


IdEncoder = for_flavor(flavor.active()).IdEncoder
