"""σ of every element of a long problem: the suite's error model in closed form.

The model is that of `conformance.definition.arithmetic`, computed from the sums of the oracle.
Tensors, logits, probabilities and accumulators are stored with the roundoffs u_t, u_s, u_p and ũ,
and each error is uniform, so that its variance is u²/3. Three things are particular to long
sequences:

- *Equal pairs are rounded alike.* The errors of a logit, its exponential and its rounding are the
  same for all keys of a class. Together they are one error ε_ac, which multiplies S_c − n_c O as a
  whole. At the edges of a block, a few hundred keys, errors are added as if they were independent.
- *Accumulators run over tiles.* A sum over n terms consists of n/t sums over tiles of t terms, one
  after another. For n ≤ t this is the definition's model, in which all terms are added one after
  another. Over a million terms, that model would give so much noise that it would hide any defect.
- *Second moments.* Values are arbitrary, so Σ_j P_ij² (dO_i·V_j)² is not a sum by class; it is
  replaced by |dO_i|² Σ_j P_ij² |V_j|²/head, which is its mean over independent components.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.definition.arithmetic import AccuracyClass, Exact, classes_of
from conformance.definition.dtypes import Array, DType
from conformance.definition.features import (
    Positions,
    Rotary,
    before_norm,
    normed,
    rotated,
)
from conformance.definition.problem import Problem, Shape, identities
from conformance.definition.rotary import RotaryScaling, exact_tables
from conformance.errors import Unsupported
from conformance.long.oracle import BlockPart, Columns, Head, Rows, squared_norms
from conformance.long.problem import Heads, Index, LongProblem, no_inputs
from conformance.records.numbers import UNDERFLOW

UNKNOWN = 0
"""The tile of an implementation that does not declare how many terms it sums up at once."""

_USUAL = (64, 1024)
"""The tiles of a small kernel and of a library's matrix product.

For an `UNKNOWN` tile, the larger of the two variances is used. Errors are smallest if the number of
tiles equals the number of terms in a tile, so either tile may be the worse one."""

_CHAINS = 8
"""In how many sums of one term after another libraries add a row of weights that they hold as a
whole: as many as a vector register of 32 bytes has numbers in float32."""

_COLUMNS = 4096
"""The number of columns that `sampled_head` processes at once."""

COMMON = 5
"""The number of columns of `extras` that all accuracy classes share."""


def models(dtype: DType) -> list[AccuracyClass]:
    """Return the accuracy classes to compare with in a dtype, most accurate first.

    Class C, which rounds running sums to the dtype, is left out: it is of no use for long problems.
    """
    return [accuracy for accuracy in classes_of(dtype) if not accuracy.accumulators]


def terms(number: npt.ArrayLike, tile: int, step: int = 1) -> tuple[Array, Array]:
    """Return two factors for the variance of a sum's rounding errors.

    The first multiplies the sum of the squared terms, and the second the square of the sum. With T
    tiles of t terms, the factors are (T + t)/2 and T/3 + t/3T: the squares of all partial sums add
    up to the sum of both products. For an `UNKNOWN` tile, each factor is the larger of those for
    the tiles `_USUAL`.

    Args:
        number: the number of terms of each sum.
        tile: the number of terms in a tile, or `UNKNOWN`.
        step: the dilation. A kernel that visits all keys sums only every `step`th of a tile, so
            that it has `step` times as many tiles; each factor is the larger of those for both.
    """
    found = []
    tiles_of = (tile,) if tile else _USUAL
    for most in (*tiles_of, *(-(-one // step) for one in tiles_of if step > 1)):
        size = np.clip(number, 1, most)
        tiles = np.maximum(number, 1) / size
        found.append(((tiles + size) / 2, (tiles + size / tiles) / 3))
    squares, square = zip(*found, strict=True)
    return np.maximum.reduce(squares), np.maximum.reduce(square)


def of_equal_terms(counts: Array, tile: int) -> Array:
    """Return the factor for the variance of a sum of positive terms, many of which are equal.

    It multiplies the square of the sum, like the second factor of `terms`. T tiles of equal length
    have similar partial sums, so n_c equal terms meet each binade of a tile's sum n_c/2, n_c/4, …
    times, and are rounded there by the same error, uniform within half a spacing. By the place of
    the tile's sum S/T in its binade, the squares add up to 0.021 to 0.022 u² (n_c S/T)², which is
    about u²/3 n_c²/15T². The sums of tiles of t terms are equal where their classes are, which is
    so of a share Σ (n_c/n)²ᵗ of all pairs of tiles; the sum over tiles adds u²/3 of this share of
    T²/15. For an `UNKNOWN` tile, T is the least usual number: that of tiles of the largest length
    in `_USUAL`, or `_CHAINS`.

    Args:
        counts: how many terms are equal, by row and class, `[rows classes]`.
        tile: the number of terms in a tile, or `UNKNOWN`.

    Returns:
        An array `[rows 1]`.
    """
    number, squares = np.maximum(_total(counts), 1), _total(counts**2)
    tiles = number / tile if tile else np.minimum(number / max(_USUAL), _CHAINS)
    tiles = np.maximum(tiles, 1)
    among_tiles = tiles**2 * (squares / number**2) ** tile if tile else 0.0
    return (squares / tiles**2 + among_tiles) / 15


class Variances:
    """The variance of a single rounding error in an accuracy class, relative to the rounded number.

    Attributes:
        name: the name of the accuracy class.
        tensor, logits, probability: the variance for each of these kinds of intermediates, as in
            `conformance.definition.arithmetic.Kind`.
        sums: the variance for an accumulator.
        final: the variance for a result, which is rounded to the dtype.
        underflow: the variance of a weight that underflows, or of its gradient; it is not relative.
    """

    def __init__(self, dtype: DType, accuracy: AccuracyClass) -> None:
        def variance(stored: bool) -> float:
            return (dtype.roundoff if stored else dtype.accumulator) ** 2 / 3

        self.name = accuracy.name
        self.tensor, self.logits = variance(accuracy.tensors), variance(accuracy.logits)
        self.probability = variance(accuracy.probabilities)
        self.sums, self.final = variance(False), variance(True)
        wide = min(dtype.underflow, UNDERFLOW["float32"])
        self.underflow = (dtype.underflow if accuracy.probabilities else wide) ** 2 / 3
        # In float64, the reference has rounding errors of the same size as the implementation.
        self._factor = 2.0 if dtype.name == "float64" else 1.0

    def sigma(self, variance: Array, values: Array) -> Array:
        """Return σ of results, `[rows size]`, with their final rounding added.

        Before the final rounding is added, each variance is averaged with the mean of its row.
        """
        variance = (variance + _total(variance) / max(1, variance.shape[1])) / 2
        return np.sqrt(self._factor * (variance + self.final * values**2))


class LongNoise(Variances):
    """The σ of one accuracy class, computed first for the rows and then the columns of each head.

    Args:
        problem: the problem.
        accuracy: the accuracy class.
        tile: how many keys a tile has; `UNKNOWN` if the implementation does not declare it.
    """

    def __init__(self, problem: LongProblem, accuracy: AccuracyClass, tile: int = UNKNOWN) -> None:
        dtype = problem.format
        super().__init__(dtype, accuracy)
        self.problem, self.tile, self.width = problem, tile, problem.value.shape[-1]
        # The relative variance of dP, due to its sum over the head and to its rounding.
        self._products = self.sums * (5 * self.width / 6) + self.probability
        every = [self._relative(head) for head in range(problem.sizes[1])]
        self._coherent, self._slopes, self._of_slopes = map(list, zip(*every, strict=True))

    def _relative(self, head: int) -> tuple[Array, Array, Array]:
        """Return three tables `[query_classes key_classes]` for a head.

        They are the variance of the error ε, due to logit, scale, cap and exponential; the square
        of the cap's derivative; and the variance of that derivative.
        """
        problem, size = self.problem, self.problem.queries.shape[-1]
        queries, keys = problem.queries[head], problem.keys[head // problem.group]
        logits = problem.uncapped(head)
        squares = problem.factor**2 * (queries**2 @ (keys**2).T)
        spread = max(size / 2, 1.0) * squares + max(size / 3 - 0.5, 0.0) * logits**2
        variance = self.sums * spread + 2 * self.logits * logits**2
        cap, slopes = problem.soft_cap, problem.slope(head) ** 2
        if cap is None:
            return variance + self.probability, slopes, np.zeros_like(slopes)
        capped = problem.logits(head) / cap
        # The quotient, its tanh, the product, and the derivative 1 − tanh² are rounded.
        of_tanh = slopes * (variance / cap**2 + self.logits * (logits / cap) ** 2)
        of_tanh += self.logits * capped**2
        variance = cap**2 * (of_tanh + self.logits * capped**2)
        of_slope = 4 * capped**2 * of_tanh + (self.logits + self.probability) * slopes
        return variance + self.probability, slopes, of_slope

    def of_rows(self, head: Head, block: Rows) -> tuple[Array, Array, Array, Array]:
        """Return σ of the output and gradient of a block of queries, and two variances for keys.

        They are σ of the output `[rows value_head]`; σ of the gradient `[rows head]`; the relative
        variance of whole rows of weights `[rows]`; and the variance of the row term D `[rows]`.
        """
        rows, width = block.span, self.width
        weight, row = head.weight[rows, None], head.row[rows, None]
        weights = weight * block.powers
        squared = weights * weights
        before = squared * self._coherent[head.head][head.query_class[rows]]
        after = squared * self.probability
        output, cotangent, count = block.output, block.cotangent, block.count
        of_terms, of_sum = self._terms(block.around.seen)

        # ε (S − n O) and the rounding η S of the weights, class by class.
        edges = block.around.visible * before[:, block.of_columns]
        every = block.around.visible * (before + after)[:, block.of_columns]
        squares, mixed = every @ block.values**2, edges @ block.values
        ones = edges.sum(axis=1, keepdims=True)
        if block.inner is not None:
            summed, number = block.inner[:, :width], block.inner[:, width]
            squares += (before + after) @ summed**2
            mixed += before @ (number[:, None] * summed)
            ones += (before @ number**2)[:, None]
        coherent = np.maximum(squares - 2 * output * mixed + output**2 * ones, 0)
        # The accumulator of the output, weights that underflow, and storing the output.
        mean_squares = _total(squared * block.squares) / width
        alone = self.sums * (of_terms * mean_squares + of_sum * output**2)
        alone += self.underflow * _total(block.squares) / width
        alone += self.tensor * output**2
        # The normaliser and its logarithm scale a whole row.
        log_total = np.where(np.isfinite(block.log_total), block.log_total, 0.0)[:, None]
        of_equal = of_equal_terms(count, self.tile)
        whole = self.sums * (of_terms * _total(squared * count) + of_sum + of_equal)
        whole += self.logits + self.sums * log_total**2
        if self.problem.sinks is not None:
            whole += self._of_sink(head)[head.query_class[rows], None] * weight**2 + self.logits
        variance = coherent + alone + whole * output**2

        centred = block.dotted - row * count
        of_row = _total(cotangent**2 * alone) + whole * row**2
        of_row += _total(before * centred**2 + after * block.dotted**2)
        of_row += self.sums * (width / 2) * _total(cotangent**2 * output**2)
        of_row += (self.sums * width / 3 + self.logits) * row**2

        of_products = _total(cotangent**2) * block.squares / width
        of_logits = np.maximum(of_products - 2 * row * block.dotted + row**2 * count, 0)
        per_class = (before + after) * centred**2
        per_class += squared * (self._products * of_products)
        per_class += squared * (2 * self.probability + self.sums * of_terms) * of_logits
        # Weights underflow, their gradients, and these times the scale.
        per_class += self.underflow * (count + of_logits)
        if self.problem.soft_cap is not None:
            of_queries = head.query_class[rows]
            per_class *= self._slopes[head.head][of_queries]
            per_class += squared * centred**2 * self._of_slopes[head.head][of_queries]
            weights = weight * head.slopes[of_queries]
        gradient = per_class @ head.keys**2 + of_row * ((weights * count) @ head.keys) ** 2
        gradient *= self.problem.factor**2
        gradient += self.underflow * count @ head.keys**2
        gradient += (whole + self.sums * of_sum + self.tensor) * block.d_query**2
        return (
            self.sigma(variance, output),
            self.sigma(gradient, block.d_query),
            whole[:, 0],
            of_row[:, 0],
        )

    def _terms(self, seen: npt.ArrayLike) -> tuple[Array, Array]:
        squares, square = terms(seen, self.tile)
        return squares[:, None], square[:, None]

    def _of_sink(self, head: Head) -> Array:
        """Return the variance of the exponential of the head's sink, `[query_classes]`."""
        assert self.problem.sinks is not None
        sink = float(self.problem.sinks[head.head])
        moved = sink**2 if np.isfinite(sink) else 0.0
        return head.of_sink**2 * self.logits * (moved + 1.0)

    def of_sinks(self, head: Head, rows: slice, whole: Array, of_row: Array) -> Array:
        """Return what some queries contribute to the gradient of their sink and to its σ.

        Args:
            head: the head, after `of_rows` of these queries.
            rows: the queries.
            whole, of_row: the variances that `of_rows` returned for them.

        Returns:
            The sum, the sum of squares, and the variance of the terms, as `sinks` takes them.
        """
        of_queries = head.query_class[rows]
        weights, row = head.weight[rows] * head.of_sink[of_queries], head.row[rows]
        each = (weights * row) ** 2
        exponential = self._of_sink(head)[of_queries] * head.weight[rows] ** 2
        variance = each @ (whole + 2 * self.probability) + exponential @ row**2
        return np.array([-weights @ row, each.sum(), variance + weights**2 @ of_row])

    def sinks(self, summed: Array) -> tuple[Array, Array]:
        """Return the gradient of a sink and its σ, `[1 1]` each.

        `summed` is the sum of the results of `of_sinks` over all queries.
        """
        number, of_squares, variance = summed
        batch, _, length = self.problem.query_class.shape
        squares, square = terms(batch * length, self.tile)
        variance += self.sums * (squares * of_squares + square * number**2)
        variance += self.tensor * number**2
        value = np.array([[number]])
        return value, self.sigma(np.array([[variance]]), value)

    def of_log_total(self, head: Head, block: Rows, whole: Array) -> tuple[Array, Array]:
        """Return the log-normaliser of a block of queries and its σ, `[rows 1]` each.

        Implementations return it in float32. It must be exactly −∞ for a query that sees nothing,
        if there is no sink.
        """
        shares = head.weight[block.span, None] * block.powers * block.count
        of_logits = self._coherent[head.head][head.query_class[block.span]]
        errors = _total(shares**2 * of_logits) + whole[:, None]
        seen = head.weight[block.span, None] > 0
        return block.log_total[:, None], np.sqrt(self._factor * np.where(seen, errors, 0.0))

    def of_columns(self, block: Columns, extra: int) -> tuple[Array, Array]:
        """Return σ of the gradients of a block of keys, and σ of the gradients of their values.

        The shapes are `[keys head]` and `[keys value_head]`. `extra` is the index in `Head.extra`
        where the numbers of this accuracy class begin; see `extras`.
        """
        parts = [self._of_part(block, part, extra) for part in block.parts]
        key, value = (np.add.reduce(list(each)) for each in zip(*parts, strict=True))
        d_key, d_value = block.d_key, block.d_value
        if len(parts) > 1:
            key, value = key + self.tensor * d_key**2, value + self.tensor * d_value**2
        return self.sigma(key, d_key), self.sigma(value, d_value)

    def _of_part(self, block: Columns, part: BlockPart, extra: int) -> tuple[Array, Array]:
        head, width = part.head, self.width
        squared = part.powers**2
        relative = self._coherent[head.head].T[head.key_class[block.span]] + self.probability
        coherent = squared * relative
        of_terms, of_sum = self._terms(block.around.seen)
        weighted, rows, ones, cotangents, every = np.moveaxis(part.extra[..., :COMMON], -1, 0)
        whole, of_row = np.moveaxis(part.extra[..., extra : extra + 2], -1, 0)

        edges = block.around.visible * coherent[:, part.of_queries]
        value = edges @ part.numbers[:, :width] ** 2
        if part.inner is not None:
            value += coherent @ part.inner[:, :width] ** 2
        scalar = squared * (whole + self.sums * of_terms * weighted)
        scalar += self.underflow * cotangents
        value += _total(scalar) / width
        value += (self.sums * of_sum + self.tensor) * part.d_value**2

        of_logits = 2 * self.probability + self.sums * of_terms
        squares = squared_norms(block.values)[:, None] / width
        per_class = coherent * part.dotted**2
        # Rows of equal queries are often scaled alike, so their errors may add up for a key.
        together = np.divide(whole, weighted, out=np.zeros_like(whole), where=weighted > 0)
        per_class += squared * np.maximum(squares * whole, together * part.dotted**2)
        per_class += squared * squares * (self._products + of_logits) * weighted
        per_class += squared * (of_logits * rows + of_row)
        # Weights underflow, their gradients, and these times the scale.
        per_class += self.underflow * (ones + squares * cotangents + every)
        if self.problem.soft_cap is not None:
            of_keys = head.key_class[block.span]
            per_class *= self._slopes[head.head].T[of_keys]
            per_class += squared * part.dotted**2 * self._of_slopes[head.head].T[of_keys]
        key = self.problem.factor**2 * (per_class @ head.queries**2)
        key += self.underflow * ones @ head.queries**2
        key += (self.sums * of_sum + self.tensor) * part.d_key**2
        return key, value


def noises(problem: LongProblem, tile: int = UNKNOWN) -> list[LongNoise]:
    """Return the noise of each class of `models`, most accurate first."""
    return [LongNoise(problem, accuracy, tile) for accuracy in models(problem.format)]


def extras(head: Head, block: Rows, of_classes: list[tuple[Array, Array]]) -> Array:
    """Return the numbers of each query that the noise of keys needs, `[rows extra]`.

    In the symbols of `oracle`, they are w²|dO|², w²D², 1, |dO|² and D². For each accuracy class,
    two more follow: the relative variance of the row times w²|dO|², and w² times the variance of D;
    `of_classes` holds both variances. All numbers are 0 for a query with w = 0.
    """
    rows = block.span
    weight = head.weight[rows] ** 2
    squares = squared_norms(block.cotangent)
    seen = (weight > 0).astype(np.float64)
    row_squares = head.row[rows] ** 2
    common = [weight * squares, weight * row_squares, seen, seen * squares, seen * row_squares]
    for whole, of_row in of_classes:
        common += [weight * squares * whole, weight * of_row]
    return np.column_stack(common)


def sampled_head(
    heads: Heads, head: int, chosen: np.ndarray, of: Variances, tile: int
) -> dict[str, tuple[Array, Array]]:
    """Return the expected output and gradients of one head, each with the variance of its errors.

    Only the first batch entry is considered.

    The model is that of `LongNoise`, except that every error is independent, as no two logits are
    equal; `_Prepared` adds that of norm and rotation. The cost is O(rows · length · head size).

    Args:
        heads: the inputs, as from `generic`, with a cotangent of 0 except in the chosen rows.
        head: the query head.
        chosen: the rows of "output" and "query" to return; "key" and "value" are complete.
        of: the variances of rounding errors.
        tile: how many keys a tile has, or `UNKNOWN`.

    Returns:
        Arrays `[row size]`, by name. What this head adds to the gradients of the gains of a norm,
        "norm.query" and "norm.key", is `[1 head]`.
    """
    kv_head = head * heads.key.shape[1] // heads.query.shape[1]
    key, value = (array[0, kv_head].astype(np.float64) for array in (heads.key, heads.value))
    query = heads.query[0, head, chosen].astype(np.float64)
    cotangent = heads.cotangent[0, head, chosen].astype(np.float64)
    places = heads.sees.positions(0, heads.query.shape[2], len(key))
    is_prepared = heads.rotary is not None or heads.norm is not None
    if is_prepared:
        length = max(int(side.max(initial=0)) for side in places) + 1
        queries = _Prepared(heads, "query", query, places[0][chosen], of, length)
        keys = _Prepared(heads, "key", key, places[1], of, length)
        query, key = queries.heads, keys.heads
    sees = _Sample(heads, head, chosen)
    size, scale, sums = query.shape[1], heads.scale, of.sums
    spans = _spans(len(key))
    squares = squared_norms(value)

    def logits(span: slice) -> tuple[Array, Array]:
        """Return the logits, −∞ for keys that are not seen, and these before ALiBi."""
        before = scale * query @ key[span].T
        return sees.after(before, span), before

    peak = np.full((len(chosen), 1), -np.inf)
    total, number = np.zeros((2, len(chosen), 1))
    for span in spans:
        each, _ = logits(span)
        number += _total(np.isfinite(each))
        now = np.maximum(peak, each.max(axis=1, keepdims=True))
        finite = np.where(np.isfinite(now), now, 0.0)
        total = total * np.exp(peak - finite) + _total(np.exp(each - finite))
        peak = now
    log_total = np.where(total > 0, peak + np.log(np.where(total > 0, total, 1.0)), 0.0)

    def weights(span: slice) -> tuple[Array, Array, Array]:
        """Return the weights, the relative variance of each, and 1 for keys that are seen, or 0.

        The variance is that of the logit and of the exponential.
        """
        each, before = logits(span)
        before = np.where(np.isfinite(each), before, 0.0)
        spread = size / 2 * scale**2 * (query**2 @ (key[span] ** 2).T)
        relative = sums * (spread + max(size / 3 - 0.5, 0) * before**2)
        relative += 2 * of.logits * before**2 + of.probability
        if heads.slopes is not None:
            # Slope times distance and the difference are rounded, too.
            after = np.where(np.isfinite(each), each, 0.0)
            relative += of.logits * ((before - after) ** 2 + after**2)
        if is_prepared:
            relative += scale**2 * queries.of_products(keys, span)
        return np.exp(each - log_total), relative, np.isfinite(each).astype(np.float64)

    output, of_output, mixed = np.zeros((3, *cotangent.shape))
    of_squares, of_weights, lost = np.zeros((3, len(chosen), 1))
    # Sums of the squared errors of a row: of its weights, times dP and dP², and of rounded P dP.
    of_ones, of_products, of_both, of_rounded = np.zeros((4, len(chosen), 1))
    for span in spans:
        weight, relative, seen = weights(span)
        error, d_weights = weight**2 * relative, cotangent @ value[span].T
        output += weight @ value[span]
        lost += (seen @ squares[span])[:, None]
        of_output += (error + weight**2 * of.probability) @ value[span] ** 2
        mixed += error @ value[span]
        of_squares += (weight**2 @ squares[span])[:, None]
        of_weights += _total(weight**2)
        of_ones += _total(error)
        of_products += _total(error * d_weights)
        of_both += _total(error * d_weights**2)
        of_rounded += _total((weight * d_weights) ** 2)
    of_terms, of_sum = terms(np.maximum(number, 1), tile, heads.dilation or 1)
    whole = sums * (of_terms * of_weights + of_sum + log_total**2) + of.logits
    # The error of a logit moves the output towards the value of its key, or away from it.
    of_output = np.maximum(of_output - 2 * output * mixed + of_ones * output**2, 0)
    alone = sums * (of_terms * of_squares / size + of_sum * output**2) + of.tensor * output**2
    alone += of.underflow * lost / size
    of_output += alone + whole * output**2
    row = _total(cotangent * output)
    # What the errors of the logits do to the row term is counted with what else they do.
    of_row = _total(cotangent**2 * alone) + whole * row**2
    of_row += sums * size / 2 * _total(cotangent**2 * output**2)
    of_row += (sums * size / 3 + of.logits) * row**2
    of_both += row**2 * of_ones - 2 * row * of_products
    of_products -= row * of_ones

    d_query, of_query, mean_key, along_query = (np.zeros_like(query) for _ in range(4))
    moved, pulled = np.zeros((2, *query.shape))
    d_key, of_key = np.zeros((2, *key.shape))
    d_value, of_value = np.zeros((2, *value.shape))
    few = len(chosen)
    for span in spans:
        weight, relative, seen = weights(span)
        d_weights = cotangent @ value[span].T
        own = weight * (d_weights - row)
        spread = size / 2 * (cotangent**2 @ value[span].T ** 2)
        spread += max(size / 3 - 0.5, 0) * d_weights**2
        alone = weight**2 * (sums * spread + of.probability * d_weights**2)
        # Weights underflow, their gradients, and these times the scale.
        alone += 2 * of.probability * own**2 + of.underflow * seen * (1 + (d_weights - row) ** 2)
        error = own**2 * (relative + of.probability + sums * of_terms) + alone
        d_query += scale * own @ key[span]
        of_query += (scale**2 * error + of.underflow * seen) @ key[span] ** 2
        rounded = of.probability * own * weight * d_weights
        moved += scale * (relative * own**2 + rounded) @ key[span]
        pulled += scale * (relative * own * weight) @ key[span]
        mean_key += scale * weight @ key[span]
        # An error moves the weight of its key and, by the normaliser, those of all other keys.
        error = relative * own**2 * (1 - 4 * weight) + own**2 * of_ones
        error += 2 * own * weight * of_products + weight**2 * of_both
        error += of.probability * (own**2 + weight**2 * of_rounded) - 2 * weight * rounded
        error = np.maximum(error, 0) + alone + weight**2 * of_row
        error += own**2 * (whole + sums * few / 2)
        d_logits = scale * own
        d_key[span] = d_logits.T @ query
        of_key[span] = (scale**2 * error + of.underflow * seen).T @ query**2
        of_key[span] += (sums * few / 3 + of.tensor) * d_key[span] ** 2
        if is_prepared:
            along_query += (d_logits * keys.positions[span]) @ key[span]
            of_query += d_logits**2 @ keys.variance(span)
            of_key[span] += (d_logits**2).T @ queries.variance()
            along = (d_logits * queries.positions[:, None]).T @ query
            d_key[span], of_key[span] = keys.back(span, d_key[span], of_key[span], along)
        d_value[span] = weight.T @ cotangent
        error = np.maximum(relative * (1 - 2 * weight) + of_ones, 0) + of.probability
        error += whole + sums * few / 2
        of_value[span] = (weight**2 * error + of.underflow * seen).T @ cotangent**2
        of_value[span] += (sums * few / 3 + of.tensor) * d_value[span] ** 2
    of_both += of.probability * of_rounded
    of_query += mean_key * (mean_key * (of_both + of_row) - 2 * moved)
    of_query += d_query * (d_query * of_ones + 2 * mean_key * of_products - 2 * pulled)
    of_query = np.maximum(of_query, 0) + (whole + sums * of_sum + of.tensor) * d_query**2
    found = {"output": (output, of_output), "query": (d_query, of_query)}
    if is_prepared:
        found["query"] = queries.back(slice(None), d_query, of_query, along_query)
    found |= {"key": (d_key, of_key), "value": (d_value, of_value)}
    if heads.norm is not None:
        found |= {"norm.query": queries.of_gain(tile), "norm.key": keys.of_gain(tile)}
    return found


class _Sample:
    """What the definition makes of the logits of one head in some queries: ALiBi, and all rules.

    Both are taken from its entries, on problems of these queries and of a span of keys.

    Args:
        heads: the inputs.
        head: the query head.
        chosen: the queries.
    """

    def __init__(self, heads: Heads, head: int, chosen: np.ndarray) -> None:
        queries, keys = heads.query.shape[2], heads.key.shape[2]
        self._chosen, self._places = chosen, heads.sees.positions(0, queries, keys)
        self._rules = heads.sees.rules(1, queries, keys)
        self._lengths = self._rules.pop("key_lengths")
        # The ids of keys from which the definition tells what their queries are.
        of_keys = {"global_tokens": heads.global_tokens, "spans": heads.spans}
        self._of_keys = {n: ids[:1] for n, ids in of_keys.items() if ids is not None}
        self._features: dict[str, Any] = {"dilation": heads.dilation}
        if heads.slopes is not None:
            self._features["slopes"] = heads.slopes[head : head + 1].astype(np.float64)
        self._dtype = heads.dtype
        # The definition finds what queries are by the keys at their positions.
        own = np.clip(self._places[0][chosen], 0, keys - 1)
        self._own = own if self._of_keys else own[:0]
        if self._of_keys and heads.sees.members is not None:
            raise Unsupported("global tokens or spans in packed sequences, at length")

    def after(self, before: Array, span: slice) -> Array:
        """Return logits `[chosen span]` after ALiBi, −∞ where no rule lets a query see a key."""
        count = span.stop - span.start
        at = np.concatenate([np.arange(span.start, span.stop), self._own])
        problem = self._problem(at)
        logits = np.pad(before, ((0, 0), (0, len(self._own))))[None, None]
        for entry in problem.entries:
            logits, _ = entry.on_logits(problem, logits, Exact())
        allowed = problem.allowed
        if allowed is not None:
            logits = np.where(allowed, logits, -np.inf)
        return np.asarray(logits[0, 0, :, :count])

    def _problem(self, keys: Index) -> Problem:
        rows = self._chosen
        shape = Shape.of_heads((1, 1, len(rows), 1), (1, 1, len(keys), 1))
        changes: dict[str, Any] = {**no_inputs(shape), **self._rules, **self._features}
        if (segments := changes.get("segments")) is not None:
            of = {"query": segments.query[:1, rows], "key": segments.key[:1, keys]}
            changes["segments"] = replace(segments, **of)
        if self._lengths is not None:
            changes["mask"] = (keys < self._lengths[0])[None, None, None]
        changes |= {name: ids[:, keys] for name, ids in self._of_keys.items()}
        at = Positions(query=self._places[0][None, rows], key=self._places[1][None, keys])
        return Problem(
            shape=shape,
            dtype=self._dtype,
            weights=identities(shape),
            positions=at,
            **changes,
        )


class _Prepared:
    """Queries or keys after norm and rotation, and the variance of what both add to their errors.

    Args:
        given: the inputs, with a norm, a rotation or both.
        side: "query" or "key".
        heads: the queries or keys `[token head]`.
        positions, of, length: as for `_Turned`.
    """

    def __init__(
        self, given: Heads, side: str, heads: Array, positions: Index, of: Variances, length: int
    ) -> None:
        self.positions, self._normed, self._turned = positions, None, None
        if given.norm is not None:
            self._normed = _Normed(heads, getattr(given.norm, side), given.norm.epsilon, of)
            heads = self._normed.heads
        if given.rotary is not None:
            scaling = given.rotary_scaling
            self._turned = _Turned(heads.copy(), positions, given.rotary, of, scaling, length)
            heads = self._turned.heads
        self.heads = heads

    def variance(self, of: slice = slice(None)) -> Array:
        """Return the variance of the tokens `of`, without what all positions share."""
        if self._normed is None:
            assert self._turned is not None
            return self._turned.variance(of)
        found = self._normed.variance(of)
        return found if self._turned is None else self._turned.of_turned(found, of)

    def of_products(self, keys: _Prepared, span: slice) -> Array:
        """Return the variance of the products of these queries with some keys, `[query key]`."""
        found = self.variance() @ keys.heads[span].T ** 2 + self.heads**2 @ keys.variance(span).T
        if self._turned is not None and keys._turned is not None:
            found += self._turned.of_shared(keys._turned, span)
        return found

    def back(
        self, of: slice, gradient: Array, variance: Array, along: Array
    ) -> tuple[Array, Array]:
        """Return the gradient of the tokens `of` before both, and its variance.

        The arguments are those of `_Turned.back`.
        """
        if self._turned is not None:
            gradient, variance = self._turned.back(of, gradient, variance, along)
        if self._normed is not None:
            gradient, variance = self._normed.back(of, gradient, variance)
        return gradient, variance

    def of_gain(self, tile: int) -> tuple[Array, Array]:
        """Return the gradient of the norm's gain and its variance, after all calls of `back`."""
        assert self._normed is not None
        return self._normed.of_gain(tile)


class _Normed:
    """Queries or keys after their norm, and the variance of what it adds to their errors.

    The model is that of the definition, with n = x/ρ and y = n g. The error of the root ρ, which
    all components of a token share, is that of the sum of squares, by the share of the mean square
    in ρ², and those of storing the mean and the root. n and y are rounded. In the backward pass,
    with A = mean(g dy n), an error of ρ moves dx ρ = g dy − n A by 2 n A − dx ρ.

    Args:
        heads: the queries or keys before the norm, `[token head]`.
        gain: `[head]`.
        epsilon: the number that is added to the mean square.
        of: the variances of rounding errors.
    """

    def __init__(self, heads: Array, gain: Array, epsilon: float, of: Variances) -> None:
        self._gain, self._of = gain, of
        found, self._kept = normed(heads[None, None], gain, epsilon, Exact())
        self.heads, (self._quotients, self._root) = found[0, 0], (a[0, 0] for a in self._kept)
        squares = heads**2
        total = _total(squares)
        relative = self._of_sum(squares) / np.where(total > 0, total, 1.0) ** 2 + of.logits
        share = np.mean(self._quotients**2, axis=1, keepdims=True)
        self._of_root = share**2 * relative / 4 + of.logits
        self._of_gains = np.zeros((4, heads.shape[1]))

    def _of_sum(self, terms: Array) -> Array:
        """Return the variance of the sums of terms over the head, stored like a logit."""
        size, total = terms.shape[1], _total(terms)
        spread = size / 2 * _total(terms**2) + max(size / 3 - 0.5, 0.0) * total**2
        return self._of.sums * spread + self._of.logits * total**2

    def variance(self, of: slice) -> Array:
        """Return the variance of the normed tokens `of`, `[token head]`."""
        return self.heads[of] ** 2 * (self._of_root[of] + 2 * self._of.tensor)

    def back(self, of: slice, gradient: Array, variance: Array) -> tuple[Array, Array]:
        """Return the gradient of the tokens `of` before the norm, and its variance."""
        quotients, root, rounding = self._quotients[of], self._root[of], self._of
        kept = quotients[None, None], root[None, None]
        found, d_gain = before_norm(gradient[None, None], self._gain, kept, Exact())
        squares, size = quotients**2, gradient.shape[1]
        of_root, terms_of_gain = self._of_root[of], (gradient * quotients) ** 2
        self._of_gains[0] += d_gain
        self._of_gains[1] += terms_of_gain.sum(axis=0)
        self._of_gains[2] += (squares * variance + terms_of_gain * (of_root + rounding.tensor)).sum(
            axis=0
        )
        self._of_gains[3] += gradient.any(axis=1).sum()
        inner = gradient * self._gain
        variance = variance * self._gain**2 + rounding.tensor * inner**2
        products = inner * quotients
        mean = np.mean(products, axis=1, keepdims=True)
        along = quotients * mean
        across = inner - along
        of_mean = self._of_sum(products) + _total(squares * variance)
        of_mean = (of_mean + rounding.tensor * _total(products**2)) / size**2
        of_mean += rounding.logits * mean**2
        moved = variance * (1 - 2 * squares / size) + squares * of_mean
        moved += (rounding.tensor + rounding.logits) * along**2 + rounding.logits * across**2
        moved += of_root * (2 * along - across) ** 2
        moved = np.maximum(moved, 0) / root**2 + rounding.tensor * found[0, 0] ** 2
        return found[0, 0], moved

    def of_gain(self, tile: int) -> tuple[Array, Array]:
        """Return the gradient of the gain and its variance, `[1 head]`; see `_Prepared.of_gain`."""
        gradient, squares, variance, count = self._of_gains
        of_squares, of_square = terms(count, tile)
        variance = variance + self._of.sums * (of_squares * squares + of_square * gradient**2)
        return gradient[None], (variance + self._of.tensor * gradient**2)[None]


class _Turned:
    """Queries or keys after their rotation, and the variance of what it adds to their errors.

    The model is that of the definition. The angle p f of a pair at position p, with the frequency
    f = exp(x), is off by p f (μ + ν), where μ is the error of the frequency, which all positions
    share, and ν that of the product. In units of ũ²/3, their variances are 1 + x² and 1. The error
    of an angle moves a pair at right angles to itself. A logit depends on the difference of two
    positions, and so on μ (p − r), whereas each ν enters alone. Cosines and sines, products with
    them, and their sums are rounded; squares of cosine and sine are replaced by their mean, 1/2.

    Args:
        heads: the queries or keys before the rotation, `[token head]`; they are overwritten.
        positions: `[token]`.
        rotary: the rotation.
        of: the variances of rounding errors.
        scaling: how frequencies are scaled, or None. The variance of μ is then that of `Scaled`,
            and an attention factor multiplies cosines and sines, which are rounded once more.
        length: the last position of any token plus 1.
    """

    def __init__(
        self,
        heads: Array,
        positions: Index,
        rotary: Rotary,
        of: Variances,
        scaling: RotaryScaling | None,
        length: int,
    ) -> None:
        self.positions, self._rotary, self._of = positions, rotary, of
        self._gain = 1.0 if scaling is None else scaling.gain
        exponents = -math.log(rotary.base) * np.arange(0, rotary.size, 2) / rotary.size
        rates, shared, self._how = np.exp(exponents), 1 + exponents**2, None
        if scaling is not None:
            self._how = scaling.scaled(rotary.size, rotary.base, length)
            rates, shared = self._how.frequencies(), self._how.variance()
        self._rates, self._shared, self._rotates = np.zeros((3, heads.shape[1]))
        for place in rotary.places():
            self._rates[place] = rates**2
            self._shared[place] = rates**2 * shared
            self._rotates[place] = 1.0
        self.heads = heads
        for span in _spans(len(heads)):
            self.heads[span] = self._turn(heads[span], span, 1)

    def _turn(self, vectors: Array, of: slice, sign: int) -> Array:
        tables = exact_tables(self._rotary, self.positions[of], self._how)
        cosine, sine = (self._gain * table for table in tables)
        return rotated(vectors, self._rotary, cosine, sign * sine, Exact())

    def _across(self, squares: Array) -> Array:
        """Return, for the squares of each component, those of the other one of its pair."""
        found = np.zeros_like(squares)
        one, other = self._rotary.places()
        found[:, one], found[:, other] = squares[:, other], squares[:, one]
        return found

    def variance(self, of: slice = slice(None)) -> Array:
        """Return the variance of the rotated tokens `of`, without μ, `[token head]`."""
        return self._of_turning(self.heads[of], of)

    def _of_turning(self, vectors: Array, of: slice) -> Array:
        squares = vectors**2
        across = self._across(squares)
        angles = self._of.sums * self._rates * np.square(self.positions[of, None], dtype=np.float64)
        found = self._of.logits * (squares + across) + self._of.tensor * squares + angles * across
        if self._gain != 1:
            found += self._of.sums * (squares + across) / 2
        return self._rotates * found

    def of_turned(self, variance: Array, of: slice) -> Array:
        """Return the variance of the rotated tokens `of` if that before the rotation is given."""
        return self._mean(variance) + self.variance(of)

    def of_shared(self, keys: _Turned, span: slice) -> Array:
        """Return what μ adds to the variance of products with some keys, `[query key]`."""
        apart = np.subtract(self.positions[:, None], keys.positions[span], dtype=np.float64)
        shared = (self.heads**2 * self._shared) @ self._across(keys.heads[span] ** 2).T
        return self._of.sums * shared * apart**2

    def back(
        self, of: slice, gradient: Array, variance: Array, along: Array
    ) -> tuple[Array, Array]:
        """Return the gradient of the tokens `of` before the rotation, and its variance.

        Args:
            of: the tokens.
            gradient, variance: those after the rotation, `[token head]`.
            along: the sum whose value is the gradient, each of its terms times the position of the
                token on the other side. With it, μ enters once.
        """
        apart = along - self.positions[of, None] * gradient
        found = self._turn(gradient, of, -1)
        shared = self._of.sums * self._shared * apart**2
        before = self._mean(variance + self._rotates * shared)
        return found, before + self._of_turning(found, of)

    def _mean(self, variance: Array) -> Array:
        """Return variances `[token head]` with the mean of each pair, as a rotation leaves them."""
        mean = self._gain**2 * (variance + self._across(variance)) / 2
        return np.where(self._rotates, mean, variance)


def _spans(length: int) -> list[slice]:
    return [slice(at, min(at + _COLUMNS, length)) for at in range(0, length, _COLUMNS)]


def _total(values: Array) -> Array:
    return values.sum(axis=1, keepdims=True)
