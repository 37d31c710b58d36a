"""Owners that are found during training: votes for the leader of each bucket.

A bucket's leader is the row that came in most of the bucket's recent steps: it gains
a vote in a step it is in and loses one in another; without votes the first row of the
step takes over. With enough votes it owns the bucket.
"""

from __future__ import annotations

import tensorflow as tf

from tf_basis.rules.arithmetic import saturating_add
from tf_basis.rules.bucket_rule import TableState
from tf_basis.rules.grouping import RowGroups

VOTES_TO_OWN, MOST_VOTES = 8, 64


def vote(state: TableState, groups: RowGroups, missed: tf.Tensor | None):
    """The state after the votes; [E] whether a member leads its bucket; [S] owned."""
    n_buckets = tf.shape(state.bucket_steps, tf.int64)[0]
    member_of = groups.member_of
    member_rows = tf.gather(groups.rows, groups.members)

    def per_bucket(condition):
        counts = tf.math.unsorted_segment_sum(
            tf.cast(condition & groups.is_member, tf.int32), member_of, n_buckets
        )
        return counts > 0

    is_leader = member_rows == tf.gather(state.leader, member_of)
    present = per_bucket(is_leader) & (state.leader_votes > 0)
    votes = tf.where(
        present, tf.minimum(state.leader_votes + 1, MOST_VOTES), state.leader_votes - 1
    )
    replaced = votes < 0
    smallest = tf.math.unsorted_segment_min(member_rows, member_of, n_buckets)
    leader = tf.where(replaced, smallest, state.leader)
    votes = tf.where(replaced, 1, votes)
    leads = groups.is_member & (member_rows == tf.gather(leader, member_of))
    leads &= tf.gather(present | replaced, member_of)
    steps = state.leader_steps
    if missed is not None:
        steps = tf.where(steps > 0, saturating_add(steps, missed), steps)
    steps = tf.where(replaced, 0, steps)
    steps = tf.where(
        per_bucket(leads), saturating_add(steps, tf.ones_like(steps)), steps
    )
    first = state.first_moment
    if first is not None:
        first = tf.where(replaced[:, None], tf.zeros_like(first), first)
    state = state._replace(
        leader=leader, leader_votes=votes, leader_steps=steps, first_moment=first
    )
    return state, leads, votes >= VOTES_TO_OWN


def leads_row(state: TableState, groups: RowGroups) -> tf.Tensor:
    """[R] whether a row leads its bucket."""
    return groups.rows == tf.gather(state.leader, groups.segments[:, 0])
