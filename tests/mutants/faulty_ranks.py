"""Attentions on two ranks that go wrong in ways that take a rank, or all, along.

    mha-conformance run tests/mutants/faulty_ranks.py:Dies

Each is right for problems without a mask, and misbehaves for those with one that blocks.
"""

from __future__ import annotations

import os
import sys
import time

from conformance import Distributed, MaskArgument, Split, Unsupported, World


def attend(query, key, value, mask=None):
    """Attention with the heads of this rank."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    logits = query @ key.mT * query.shape[-1] ** -0.5
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    return logits.softmax(-1).nan_to_num(0.0) @ value


def blocks(mask):
    return mask is not None and not mask.all()


def on_second(shard, mask):
    return blocks(mask) and shard.rank == 1


class Right(Distributed):
    """Divides heads."""

    world = World((1, 2), (Split("heads", heads=True),), every_case=(1, 2))
    grouped = True
    mask_arguments = (MaskArgument("mask", "batch heads query key", true="attends"),)

    @staticmethod
    def on_rank(query, key, value, shard, mask=None):
        return attend(query, key, value, mask)


class Dies(Right):
    @staticmethod
    def on_rank(query, key, value, shard, mask=None):
        if on_second(shard, mask):
            os.kill(os.getpid(), 9)
        return attend(query, key, value, mask)


class Exits(Right):
    @staticmethod
    def on_rank(query, key, value, shard, mask=None):
        if on_second(shard, mask):
            os._exit(3)
        return attend(query, key, value, mask)


class Late(Right):
    """One rank sleeps."""

    world = World((1, 2), (Split("heads", heads=True),), every_case=(1, 2), limit=0.5)

    @staticmethod
    def on_rank(query, key, value, shard, mask=None):
        if on_second(shard, mask):
            time.sleep(600)
        return attend(query, key, value, mask)


class RaisesWhileOthersWait(Right):
    """The other rank waits in a collective."""

    @staticmethod
    def on_rank(query, key, value, shard, mask=None):
        import torch.distributed as dist

        if on_second(shard, mask):
            raise ValueError("not today")
        if blocks(mask) and shard.size > 1:
            dist.barrier()
        return attend(query, key, value, mask)


class LeavesByItself(Right):
    @staticmethod
    def on_rank(query, key, value, shard, mask=None):
        if on_second(shard, mask):
            sys.exit(0)
        return attend(query, key, value, mask)


class Refuses(Right):
    @staticmethod
    def on_rank(query, key, value, shard, mask=None):
        if blocks(mask):
            raise Unsupported("no mask here")
        return attend(query, key, value, mask)


class OtherShape(Right):
    @staticmethod
    def on_rank(query, key, value, shard, mask=None):
        found = attend(query, key, value, mask)
        return found[:, :, 1:] if on_second(shard, mask) else found


class TooFewAxes(Right):
    @staticmethod
    def on_rank(query, key, value, shard, mask=None):
        found = attend(query, key, value, mask)
        return found.mean() if blocks(mask) else found


class Nothing(Right):
    @staticmethod
    def on_rank(query, key, value, shard, mask=None):
        return None if on_second(shard, mask) else attend(query, key, value, mask)


class WritesIntoItsMask(Right):
    @staticmethod
    def on_rank(query, key, value, shard, mask=None):
        found = attend(query, key, value, mask)
        if on_second(shard, mask):
            mask.fill_(True)
        return found


class Echo:
    """What serves on a rank that needs no framework."""

    def __init__(self, rank, size, path, seconds):
        pass

    @staticmethod
    def prepare():
        pass

    def serve(self, payload):
        if payload == "sleep":
            time.sleep(600)
        return payload
