"""Attentions that go wrong in ways that take a process along, or leave something behind.

    mha-conformance run tests/mutants/faulty.py:Segfault

NumPy only. Each is right for problems without a mask, and misbehaves for those with one.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

# Where this file is given by its path, its neighbours are not found otherwise.
sys.path.insert(0, str(Path(__file__).parents[1]))
from mutants.miniatures import Correct, Foreign


class Faulty(Correct):
    """Right without a mask; `fault` is what happens with one."""

    def attend(self, query, key, value, masks, **options):
        found = super().attend(query, key, value, masks, **options)
        return found if "mask" not in masks else self.fault(*found)

    def fault(self, context, weights):
        raise NotImplementedError


class Fine(Faulty):
    def fault(self, context, weights):
        return context, weights


class Raises(Faulty):
    def fault(self, context, weights):
        raise ValueError("not today")


class Interrupts(Faulty):
    def fault(self, context, weights):
        raise KeyboardInterrupt("by itself")


class OwnExit(BaseException):
    pass


class RaisesBase(Faulty):
    def fault(self, context, weights):
        raise OwnExit("out of line")


class SysExit(Faulty):
    def fault(self, context, weights):
        sys.exit(3)


class OsExit(Faulty):
    def fault(self, context, weights):
        print("about to leave")
        os._exit(0)


class Segfault(Faulty):
    def fault(self, context, weights):
        ctypes.string_at(0)


class Abort(Faulty):
    def fault(self, context, weights):
        os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\n")
        os.abort()


class KilledFromOutside(Faulty):
    def fault(self, context, weights):
        os.kill(os.getpid(), signal.SIGKILL)


class Sleeps(Faulty):
    def fault(self, context, weights):
        print("waiting for a lock")
        time.sleep(600)


class ExplainedSlowly(Faulty):
    """Wrong, and so slow at other problems that the search for the cause does not end."""

    def fault(self, context, weights):
        import conformance.running.session

        conformance.running.session.explain = lambda *given: time.sleep(600)
        return 1.01 * context, weights


class HangsInC(Faulty):
    """Holds the interpreter's lock, so that no other thread of its process runs."""

    def fault(self, context, weights):
        ctypes.PyDLL(None).sleep(600)


class IgnoresSignals(Faulty):
    def fault(self, context, weights):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        while True:
            time.sleep(1)


class EatsMemory(Faulty):
    def fault(self, context, weights):
        hoard = []
        while True:
            hoard.append(np.ones(2**20))
            time.sleep(0.005)


class EatsMemoryElsewhere(Faulty):
    """In a process that it starts."""

    def fault(self, context, weights):
        greedy = (
            "hoard = []\nimport time\nwhile True: hoard.append(bytearray(2**22)); time.sleep(.01)"
        )
        subprocess.run([sys.executable, "-c", greedy], check=False)


class LeavesSomebodyBehind(Faulty):
    """Starts a process, tells its number, and dies."""

    def fault(self, context, weights):
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("started", other.pid)
        os._exit(5)


class Prints(Faulty):
    def fault(self, context, weights):
        print("\x1b[2Jnoise {" * 1000)
        os.write(1, b"straight to the descriptor\n" * 100)
        os.write(2, b"and to the other\n" * 100)
        return context, weights


class PrintsForever(Faulty):
    def fault(self, context, weights):
        line = b"x" * 65535 + b"\n"
        while True:
            os.write(1, line)


class ReturnsNone(Faulty):
    def fault(self, context, weights):
        return None


class ReturnsText(Faulty):
    def fault(self, context, weights):
        return "attention"


class WrongShape(Faulty):
    def fault(self, context, weights):
        return context[..., :-1], weights


class WrongDtype(Faulty):
    def fault(self, context, weights):
        return context.astype(np.float64), weights


class NotANumber(Faulty):
    def fault(self, context, weights):
        return np.full_like(context, np.nan), weights


class ForeignArray(Faulty):
    def fault(self, context, weights):
        return Foreign(context), weights


class Draws(Faulty):
    """Takes numbers from the generators that everybody shares."""

    def fault(self, context, weights):
        random.random()
        np.random.rand()
        return context, weights


class Reseeds(Faulty):
    def fault(self, context, weights):
        random.seed(0)
        np.random.seed(0)
        return context, weights


class Rearranges(Faulty):
    """Changes what belongs to the whole process."""

    def fault(self, context, weights):
        np.seterr(all="raise")
        os.environ["FAULTY"] = "was here"
        os.chdir("/")
        return context, weights


class Slow(Faulty):
    """Right, and slow enough to be killed at any moment."""

    def attend(self, query, key, value, masks, **options):
        time.sleep(0.02)
        return super().attend(query, key, value, masks, **options)

    def fault(self, context, weights):
        return context, -weights


# With inputs that contradict each other


def counted_by(array, shape):
    """What a kernel reads that computes addresses from other sizes, without looking at its own."""
    if array.shape == shape or not array.flags.c_contiguous:
        return array
    strides = np.cumprod([array.itemsize, *shape[:0:-1]])[::-1]
    return np.lib.stride_tricks.as_strided(array, shape, strides)


class CountsByTheKeys(Correct):
    """Reads as many values as there are keys, also those that are not there."""

    def attend(self, query, key, value, masks, **options):
        value = counted_by(value, (*key.shape[:3], value.shape[3]))
        return super().attend(query, key, value, masks, **options)


class CountsByTheLogits(Correct):
    """Reads a mask for all pairs, also from one that has fewer."""

    def attend(self, query, key, value, masks, **options):
        if 1 not in getattr(masks.get("mask"), "shape", (1,)):
            logits = (*query.shape[:3], key.shape[2])
            masks = masks | {"mask": counted_by(masks["mask"], logits)}
        return super().attend(query, key, value, masks, **options)


class ReadsFloats(Correct):
    """Reads 32 bits for each number, whatever it is given, through a pointer."""

    def attend(self, query, key, value, masks, **options):
        if query.dtype != np.float32:
            pointer = ctypes.cast(query.ctypes.data, ctypes.POINTER(ctypes.c_float))
            query = np.ctypeslib.as_array(pointer, query.shape)
        return super().attend(query, key, value, masks, **options)


class Truncates(Correct):
    """Attends to no more keys than there are values."""

    def attend(self, query, key, value, masks, **options):
        length = min(key.shape[2], value.shape[2])
        return super().attend(query, key[:, :, :length], value[:, :, :length], masks, **options)


class Ending(Correct):
    """Does not survive a key without a value."""

    def attend(self, query, key, value, masks, **options):
        if value.shape[2] < key.shape[2]:
            self.end()
        return super().attend(query, key, value, masks, **options)

    def end(self):
        ctypes.string_at(0)


class EndsInSilence(Ending):
    """From C, and with the exit code of a success."""

    def end(self):
        ctypes.CDLL(None)._exit(0)


class Ponders(Ending):
    def end(self):
        time.sleep(600)


class Hesitates(Ending):
    def end(self):
        time.sleep(1.5)


class EndsAlways(Correct):
    """Survives nothing but inputs of equal batches and dtypes, all of float32."""

    def attend(self, query, key, value, masks, **options):
        fits = query.shape[0] == key.shape[0] == value.shape[0] and key.shape[2] == value.shape[2]
        if not fits or query.ndim < 4 or query.shape[3] != key.shape[3]:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().attend(query, key, value, masks, **options)
