"""KV memory that holds no token, and the number of running requests, with paged and with contiguous
allocation of the same memory (a section of ``bench.cpu``).

The real scheduler and block pool run over a synthetic trace without a model, since only lengths matter.
Contiguous means a server without paging: a request reserves its longest possible context when it starts,
either the model's or its prompt plus max_tokens.
"""

import random
from statistics import fmean

from quire_server.core.request import Request
from quire_server.core.sampling_params import SamplingParams
from quire_server.core.scheduler import Scheduler, SchedulerConfig
from quire_server.core.step import StepResult

MAX_MODEL_LEN, BLOCK_SIZE, NUM_BLOCKS = 2048, 16, 1024
REQUESTS, MAX_TOKENS = 600, 512
STOP = 1


def trace() -> list[tuple[int, int]]:
    """(prompt, answer) lengths: chats of 20 to 900 tokens; of eight answers seven are short, one is long.
    Every client allows 512 tokens, as most do, and most answers end before that.
    """
    rng = random.Random(5)
    return [
        (min(900, max(20, int(rng.lognormvariate(4.8, 0.8)))), 500 if i % 8 == 7 else rng.randrange(20, 150))
        for i in range(REQUESTS)
    ]


def paged(lengths: list[tuple[int, int]]) -> tuple[float, float, int]:
    """(share of allocated slots without a token, running requests, preemptions)."""
    config = SchedulerConfig(256, 2048, MAX_MODEL_LEN, NUM_BLOCKS, BLOCK_SIZE, enable_prefix_caching=False)
    scheduler = Scheduler(config, eos_token_ids=[STOP])
    ends: dict[str, int] = {}
    for number, (prompt, answer) in enumerate(lengths):
        name = str(number)
        ends[name] = prompt + answer
        ids = tuple(range(2, prompt + 2))
        scheduler.add(Request(name, ids, SamplingParams(MAX_TOKENS, temperature=0.0), 0.0))
    rows: dict[int, str] = {}
    waste, running = [], []
    while (step := scheduler.schedule()) is not None:
        rows.update((started.row, started.request_id) for started in step.started)
        reach = {
            row: start + n for row, start, n in zip(step.rows, step.starts, step.num_tokens, strict=True)
        }
        tokens = [
            STOP if reach[row] == ends[rows[row]] else 2
            for row, samples in zip(step.rows, step.samples, strict=True)
            if samples
        ]
        if scheduler.num_waiting:  # only while requests wait, that is, while memory is the limit
            sequences = scheduler._queue.running.sequences
            held = sum(sequence.capacity for sequence in sequences)
            used = sum(len(sequence.tokens) for sequence in sequences)
            waste.append(1 - used / held)
            running.append(len(sequences))
        scheduler.commit(step, StepResult(step.step_id, tuple(tokens)))
    return fmean(waste), fmean(running), scheduler.stats.preemptions


def contiguous(lengths: list[tuple[int, int]], reserved: list[int]) -> tuple[float, float]:
    """The same trace; each request holds its reservation until it ends."""
    memory, free, waiting = NUM_BLOCKS * BLOCK_SIZE, NUM_BLOCKS * BLOCK_SIZE, list(range(len(lengths)))
    running: dict[int, int] = {}  # request -> tokens so far
    waste, counts = [], []
    while waiting:
        while waiting and reserved[waiting[0]] <= free:
            number = waiting.pop(0)
            free -= reserved[number]
            running[number] = lengths[number][0]
        waste.append(1 - sum(running.values()) / (memory - free))
        counts.append(len(running))
        for number in list(running):
            running[number] += 1
            if running[number] == sum(lengths[number]):
                free += reserved[number]
                del running[number]
    return fmean(waste), fmean(counts)


def table() -> str:
    """As Markdown."""
    lengths = trace()
    waste, at_once, preemptions = paged(lengths)
    lines = ["| KV memory of 16,384 tokens | waste | requests at once | paged has |", "|---|---:|---:|---:|"]
    lines.append(
        f"| paged, blocks of {BLOCK_SIZE} ({preemptions} preemptions) | {waste:.1%} | {at_once:.1f} | |"
    )
    for name, reserved in (
        ("contiguous, prompt + max_tokens", [prompt + MAX_TOKENS for prompt, _ in lengths]),
        (f"contiguous, context of {MAX_MODEL_LEN}", [MAX_MODEL_LEN] * len(lengths)),
    ):
        other_waste, others = contiguous(lengths, reserved)
        lines.append(f"| {name} | {other_waste:.1%} | {others:.1f} | {at_once / others:.1f}x |")
    prompts, answers = zip(*lengths, strict=True)
    return "\n".join(lines) + (
        f"\n\n{REQUESTS} requests; prompts of {fmean(prompts):.0f} tokens, answers of {fmean(answers):.0f}, "
        f"max_tokens {MAX_TOKENS}; no model, the scheduler alone."
    )
