"""Which contenders of step_time.py with large state are measured together."""

from __future__ import annotations

import fbgemm_peer
from contenders import ADAGRAD, ADAM, FBGEMM, LAZY, Table

COPY_BYTES = 2**28  # each of the two buffers that the memory copy walks through
RUNTIME_BYTES = 0.7e9  # TensorFlow itself

# State, and the most temporary memory of a step, as multiples of the table. FBGEMM has
# a table of its own.
LARGE_STATE = {FBGEMM: (1.1, 0), LAZY: (2, 0.1), ADAGRAD: (1, 2), ADAM: (2, 3)}


def plan(
    tables: list[Table], limit: float
) -> tuple[list[list[tuple[Table, str]]], float]:
    """Shares out the optimizers with large state to phases that fit in memory.

    An optimizer that fits in none is entered in its table's `skipped`.  Returns the
    phases and the most memory that one of them is expected to take.
    """
    resident = RUNTIME_BYTES + 2 * COPY_BYTES + 1.1 * sum(t.table_bytes for t in tables)
    phases: list[tuple[float, float, list[tuple[Table, str]]]] = []  # state, work
    for table in tables:
        for name, (states, temporaries) in LARGE_STATE.items():
            if name in table.skipped:
                continue
            state, work = states * table.table_bytes, temporaries * table.table_bytes
            state += fbgemm_peer.RUNTIME_BYTES if name == FBGEMM else 0
            for i, (held, most_work, members) in enumerate(phases):
                if resident + held + state + max(most_work, work) <= limit:
                    members.append((table, name))
                    phases[i] = (held + state, max(most_work, work), members)
                    break
            else:
                need = resident + state + work
                if need <= limit:
                    phases.append((state, work, [(table, name)]))
                else:
                    table.skipped[name] = f"needs {need / 2**30:.1f} GiB"
    peaks = [resident + held + work for held, work, _ in phases]
    return [members for _, _, members in phases] or [[]], max(peaks, default=resident)
