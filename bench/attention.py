"""Attention of packed rows on a GPU, forward and backward in bfloat16: a dense mask beside blocks and varlen.

    python bench/attention.py                       # all cases, about a minute
    python bench/attention.py --cases plain --rows 4096,16384
    python bench/attention.py --kernels                          # blocks alone, beside transformers' mask functions

Each kernel is first compared with attention in float32, sample by sample: outputs and gradients, relative to the
largest value. Then the kernels run in turn, and the table has the median time of each and its ratio to the dense mask.
`dense` is torch's scaled_dot_product_attention with a mask of all pairs of tokens, as a row without these kernels has
it; with bounded scores or attention sinks it is the formula that transformers runs. `auto` is what `engine.attention`
chooses. At the end: what new mixtures of lengths compile, and what memory is left of them. `--kernels` prints the time
of the kernels of blocks alone, forward and backward: of our table, of the mask that transformers makes of position ids,
and of our table with other options of the kernels.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from zeropipe.engine.stages.packed_attention import PackedAttention, Samples
from zeropipe.engine.torch_private.attention import HAS_VARLEN, BlockTable, attend_blocks, attend_varlen
from zeropipe.engine.transformers_private import Reach

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # on a CPU only to see whether all of it runs
ROUNDS, CALLS, MIXTURES = 5, 4, 200
LARGEST_DENSE = 24 * 2**30  # bytes of scores that the formula may have
TOLERANCE = 0.03  # of bfloat16 against float32, relative to the largest value


@dataclass(frozen=True)
class Case:
    heads: int = 16
    kv_heads: int = 8
    size: int = 128
    window: int = 0
    softcap: float | None = None
    has_sinks: bool = False

    @property
    def reach(self) -> Reach:
        return Reach(self.window)

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and not self.has_sinks


CASES = {
    "all heads": Case(kv_heads=16),
    "plain": Case(),
    "window": Case(window=512),
    "sinks": Case(heads=64, size=64, window=128, has_sinks=True),  # gpt_oss
    "softcap": Case(size=256, softcap=50.0),  # gemma2
}
ROWS = {"plain": (2048, 4096, 8192, 16384, 32768)}
MIXES: dict[str, Callable[[int, int], list[int]]] = {
    "512": lambda tokens, seed: [512] * (tokens // 512),
    "64..1024": lambda tokens, seed: draw_lengths(tokens, seed),
}
Kernel = Callable[..., Tensor]


def draw_lengths(tokens: int, seed: int) -> list[int]:
    rng, lengths = np.random.default_rng(seed), list[int]()
    while sum(lengths) < tokens:
        lengths.append(min(int(rng.integers(64, 1025)), tokens - sum(lengths)))
    return lengths


def make_samples(lengths: list[int]) -> Samples:
    return Samples(torch.tensor([0, *lengths]).cumsum(0), 1, sum(lengths))


def draw_states(case: Case, tokens: int) -> list[Tensor]:
    """Queries, keys, values, gradients of the output, and sinks."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    shapes = [(1, heads, tokens, case.size) for heads in (case.heads, case.kv_heads, case.kv_heads, case.heads)]
    drawn = [torch.randn(shape, generator=generator, device=DEVICE).bfloat16() for shape in (*shapes, (case.heads,))]
    for index in (0, 1, 2, 4):
        drawn[index].requires_grad_()
    return drawn


def attend_with_formula(
    case: Case, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, *, mask: Tensor
) -> Tensor:
    """All scores in memory."""
    if case.is_plain:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    repeats = case.heads // case.kv_heads
    scores = (query @ key.repeat_interleave(repeats, 1).mT) * case.size**-0.5
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if case.has_sinks:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(1, -1, scores.shape[2], 1)], -1)
    shares = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    return shares[..., : key.shape[2]] @ value.repeat_interleave(repeats, 1)


def mask_of(first: Tensor) -> Tensor:
    """(tokens, tokens) from the first token that each attends to."""
    index = torch.arange(len(first), device=first.device)
    return (index >= first[:, None]) & (index <= index[:, None])


def list_kernels(case: Case, samples: Samples, tokens: int) -> dict[str, Kernel]:
    blocks = samples.table("flex", case.reach, DEVICE)
    assert isinstance(blocks, BlockTable)
    found: dict[str, Kernel] = {}
    if case.is_plain or case.heads * tokens**2 * 4 <= LARGEST_DENSE:
        mask = mask_of(blocks.first[0])
        found["dense"] = lambda q, k, v, s: attend_with_formula(case, q, k, v, s, mask=mask)
    found["flex"] = lambda q, k, v, s: attend_blocks(
        q, k, v, blocks, softcap=case.softcap, sinks=s if case.has_sinks else None
    )
    if case.is_plain and (HAS_VARLEN or DEVICE.type == "cpu"):
        borders = samples.table("varlen", case.reach, DEVICE)
        found["varlen"] = lambda q, k, v, s: attend_varlen(q, k, v, borders)
    return found


def step(case: Case, kernel: Kernel, states: list[Tensor]) -> list[Tensor]:
    """The output, and the gradients of queries, keys, values and sinks."""
    query, key, value, gradient, sinks = states
    out = kernel(query, key, value, sinks)
    used = [query, key, value, *([sinks] if case.has_sinks else [])]
    return [out.detach(), *torch.autograd.grad(out, used, gradient)]


def reference(case: Case, states: list[Tensor], lengths: list[int]) -> list[Tensor]:
    """The same in float32, one sample after the other."""
    whole = [each.detach().float() for each in states]
    parts = list[list[Tensor]]()
    for start, length in zip(np.cumsum([0, *lengths]), lengths):
        own = [each[:, :, start : start + length] for each in whole[:4]]
        sample = [each.requires_grad_() for each in (*own[:3], whole[4].clone())]
        mask = mask_of(make_samples([length]).first_keys(case.reach)[0].to(DEVICE))
        parts.append(step(case, partial(attend_with_formula, case, mask=mask), [*sample[:3], own[3], sample[3]]))
    *tokens, sinks = zip(*parts) if case.has_sinks else (*zip(*parts), ())
    return [*(torch.cat(each, 2) for each in tokens), *([torch.stack(sinks).sum(0)] if sinks else [])]


def worst_error(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(
        float((one.float() - other).abs().max() / other.abs().max()) for one, other in zip(found, wanted, strict=True)
    )


def measure(case: Case, kernels: dict[str, Kernel], states: list[Tensor]) -> dict[str, float]:
    """Median milliseconds of forward and backward; the kernels run in turn."""
    times: dict[str, list[float]] = {name: [] for name in kernels}
    for _ in range(ROUNDS):
        for name, kernel in kernels.items():
            synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                step(case, kernel, states)
            synchronize()
            times[name].append((time.perf_counter() - start) / CALLS * 1e3)
    return {name: statistics.median(each) for name, each in times.items()}


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def compare(name: str, tokens: int, mix: str) -> bool:
    """Print a row of the table; False if a kernel is wrong."""
    case, lengths = CASES[name], MIXES[mix](tokens, 0)
    states, samples = draw_states(case, tokens), make_samples(lengths)
    kernels = list_kernels(case, samples, tokens)
    wanted = reference(case, states, lengths)
    errors = {kernel: worst_error(step(case, run, states), wanted) for kernel, run in kernels.items()}
    del wanted
    times = measure(case, kernels, states)
    refusals = {} if case.is_plain else {"varlen": "not plain"}
    attention = PackedAttention("auto", refusals, frozenset({case.size}))
    chosen = attention.choose(torch.device("cuda"), torch.bfloat16)
    text = f"{name:10} {tokens:6} {mix:9}"
    for kernel in ("dense", "flex", "varlen"):
        text += f"{times[kernel]:9.2f} ms" if kernel in times else f"{'-':>12}"
    for kernel in ("flex", "varlen"):
        is_known = "dense" in times and kernel in times
        text += f"{times['dense'] / times[kernel]:8.2f}x" if is_known else f"{'-':>9}"
    text += f"  {chosen:7} " + " ".join(f"{kernel} {error:.4f}" for kernel, error in errors.items())
    is_right = all(error <= TOLERANCE for error in errors.values())
    print(text + ("" if is_right else "  WRONG"), flush=True)
    return is_right


def mask_of_transformers(samples: Samples, tokens: int) -> Any:
    """The mask that transformers makes of the position ids of packed rows."""
    from transformers import Qwen3Config
    from transformers.masking_utils import create_causal_mask

    config = Qwen3Config()
    config._attn_implementation = "flex_attention"
    first = samples.first_keys(Reach(0)).to(DEVICE)
    positions = torch.arange(tokens, device=DEVICE)[None] - first
    hidden = torch.empty(1, tokens, config.hidden_size, device=DEVICE, dtype=torch.bfloat16)
    return create_causal_mask(
        config=config, inputs_embeds=hidden, attention_mask=None, past_key_values=None, position_ids=positions
    )


# the blocks of queries and keys in the two loops of the backward, stages and warps; the first is torch's choice
SIZES = [(64, 128, 128, 64, 3, 8), (64, 64, 64, 64, 3, 4), (32, 128, 128, 32, 3, 4), (64, 128, 128, 64, 2, 8)]


def backward_options(m1: int, n1: int, m2: int, n2: int, stages: int, warps: int) -> dict[str, int]:
    sizes = {"BLOCK_M1": m1, "BLOCK_N1": n1, "BLOCK_M2": m2, "BLOCK_N2": n2, "num_stages": stages, "num_warps": warps}
    return {f"bwd_{name}": size for name, size in sizes.items()}


OPTIONS: dict[str, dict[str, Any]] = {
    "ours": {},
    "rows safe": {"ROWS_GUARANTEED_SAFE": True},
    **{f"{sizes}": backward_options(*sizes) for sizes in SIZES},
}


def compare_kernels(tokens: int, mix: str) -> None:
    """Print the time of the kernels of blocks, forward and backward, for several masks and options."""
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
    from torch.profiler import ProfilerActivity, profile

    case, samples = CASES["plain"], make_samples(MIXES[mix](tokens, 0))
    table = samples.table("flex", case.reach, DEVICE)
    assert isinstance(table, BlockTable)
    first, *blocks = table
    theirs = mask_of_transformers(samples, tokens)
    used = [int((one.kv_num_blocks + one.full_kv_num_blocks).sum()) for one in (table, theirs)]
    partial_ones = [int(one.kv_num_blocks.sum()) for one in (table, theirs)]
    print(f"{tokens} tokens, {mix}: blocks {used}, with a mask {partial_ones}", flush=True)
    long = first.long()

    def mask_with(visible: Any) -> Any:
        return BlockMask((tokens, tokens), *blocks, BLOCK_SIZE=(128, 128), mask_mod=visible)

    masks = {
        "transformers": theirs,
        "theirs over our blocks": mask_with(theirs.mask_mod),
        "first in int64": mask_with(lambda b, h, q, k: (k <= q) & (k >= long[b, q])),
        "same first": mask_with(lambda b, h, q, k: (k <= q) & (first[b, q] == first[b, k])),
    }
    runs = {name: (mask_with(lambda b, h, q, k: (k <= q) & (k >= first[b, q])), more) for name, more in OPTIONS.items()}
    runs |= {name: (mask, {}) for name, mask in masks.items()}
    query, key, value, gradient, _ = draw_states(case, tokens)
    flat = [each.detach().transpose(1, 2).contiguous().transpose(1, 2) for each in (query, key, value, gradient)]
    states = [each.requires_grad_() for each in flat[:3]]
    for name, (mask, more) in runs.items():
        torch._dynamo.reset()
        run = torch.compile(flex_attention, dynamic=False)
        options = {"FORCE_USE_FLEX_ATTENTION": True, **more}

        def both(run: Any = run, mask: Any = mask, options: Any = options) -> None:
            out, _ = run(
                *states, block_mask=mask, enable_gqa=True, kernel_options=options, return_aux=AuxRequest(lse=True)
            )
            torch.autograd.grad(out, states, flat[3])

        try:
            for _ in range(3):
                both()
        except Exception as error:
            print(f"  {name:24} {type(error).__name__}", flush=True)
            continue
        synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as traced:
            for _ in range(20):
                both()
            synchronize()
        times = {"forward": 0.0, "backward": 0.0, "other": 0.0}
        for event in traced.key_averages():
            kind = "other" if "flex" not in event.key else "backward" if "backward" in event.key else "forward"
            times[kind] += event.self_device_time_total / 20
        print(f"  {name:24} " + "".join(f"{kind} {time:7.1f} us  " for kind, time in times.items()), flush=True)


def count_compilations(tokens: int) -> None:
    """What ever new mixtures of lengths, in rows of two lengths, compile and leave in memory."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    case, counts, memory = CASES["plain"], list[int](), list[int]()
    for number in range(MIXTURES):
        length = tokens if number % 2 else tokens // 2
        states = draw_states(case, length)
        table: Any = make_samples(draw_lengths(length, number)).table("flex", case.reach, DEVICE)
        step(case, lambda q, k, v, s, table=table: attend_blocks(q, k, v, table), states)
        del states, table
        counts.append(counters["stats"]["unique_graphs"])
        memory.append(torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0)
    print(
        f"{MIXTURES} mixtures in rows of {tokens // 2} and {tokens} tokens: {counts[1]} graphs after the first two, "
        f"{counts[-1]} at the end; memory {memory[9] / 2**20:.1f} MiB after 10, {memory[-1] / 2**20:.1f} at the end"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--rows", help="tokens of a row, instead of the lengths of each case")
    parser.add_argument("--kernels", action="store_true", help="the kernels of blocks alone")
    given = parser.parse_args()
    if given.kernels:
        for tokens in map(int, (given.rows or "4096,16384").split(",")):
            compare_kernels(tokens, "64..1024")
        return
    start = time.perf_counter()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if DEVICE.type == 'cuda' else 'CPU'}")
    print(
        f"{'case':10} {'tokens':>6} {'samples':9}{'dense':>12}{'flex':>12}{'varlen':>12}{'flex':>9}{'varlen':>9}  auto"
    )
    is_right = True
    for name in given.cases.split(","):
        rows = map(int, given.rows.split(",")) if given.rows else ROWS.get(name, (4096, 16384))
        for tokens in rows:
            torch._dynamo.reset()  # a kernel for this length, as in a run with rows of one length
            for mix in MIXES:
                is_right &= compare(name, tokens, mix)
    count_compilations(int(given.rows.split(",")[-1]) if given.rows else 4096)
    print(f"{time.perf_counter() - start:.0f} s in all")
    raise SystemExit(not is_right)


if __name__ == "__main__":
    main()
