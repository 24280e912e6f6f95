"""How fast and how small `reshard convert` is, beside other ways to the same content, in one run:

    python benchmarks/convert.py --folder /tmp

- `ranks`: files of eight ranks with the DTensors of model and optimizer become one DCP checkpoint, for four ranks or,
  by torch's own way, for any.
- `verl`: files of eight ranks become a Hugging Face model in bf16, by verl's merger and by us. Needs `verl` and what
  its merger imports (ray, tensordict, omegaconf, hydra-core, codetiming, accelerate, cloudpickle, pyvers).
- `deepspeed`: files that ZeRO stage 2 wrote on four ranks become fp32 weights, beside `zero_to_fp32`, and all of the
  state, beside `ds_to_universal`. Needs `deepspeed` (`pip install --no-deps deepspeed hjson ninja py-cpuinfo einops`).

Before anything is measured, the results are compared, by stock torch and safetensors. "imports" is a program that
imports what the contender imports, and ends. Lines, table and ratios are those of `offline.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from contest import DESTINATION, Bench, Contender, folder_bytes, remove, say
from processes import RESHARD, run, script, torchrun
from record import Column, Goal
from session import Section, measure, options, report, run_main
from shapes import llama, transformer

RANKS, NEW_RANKS = 8, 4
GOALS = [
    Goal("ranks", "torch / reshard, with imports", ("torch", "seconds"), ("reshard", "seconds"), False, 3.0),
    Goal("ranks", "torch / reshard", ("torch", "inside_s"), ("reshard", "seconds"), False, None),
    Goal("ranks", "memory, torch / reshard", ("torch", "peak_bytes"), ("reshard", "peak_bytes"), False, None),
    *(
        Goal(section, f"{peer} / reshard, {what}", (peer, field), (us, field), False, goal)
        for section, peer, us in (
            ("verl", "verl", "reshard"),
            ("deepspeed", "zero_to_fp32", "reshard-weights"),
            ("deepspeed", "ds_to_universal", "reshard-all"),
        )
        for what, field, goal in (("with imports", "seconds", 3.0), ("memory", "peak_bytes", None))
    ),
    Goal("ranks", "bytes read / needed", ("reshard", "bytes_read"), ("reshard", "bytes_to_read"), True, 1.02),
]
Command = Sequence[object]
Way = Callable[[Path], Command]
COLUMNS = [
    Column("wall s", "seconds"),
    Column("inside s", "inside_s"),
    Column("GB/s", "gb_per_s"),
    Column("peak MB", "peak_bytes", 1e-6),
]


def measure_ranks(bench: Bench) -> None:
    """Eight ranks' files to one checkpoint."""
    work = bench.places["disk"]
    source, specification = work / "ranks", work / "ranks.json"
    say("writing the files of ranks")
    specification.write_text(json.dumps(transformer(bench.gigabytes * 1e9)))
    run(script("rank_files.py", "write", specification, RANKS, source))

    def torchs(destination: Path) -> list[str]:
        return script("rank_files.py", "merge", source, destination)

    def ours(destination: Path) -> Command:
        return _convert(source, destination, "--world-size", NEW_RANKS)

    _contest(bench, "ranks", f"{RANKS} files -> DCP", source, {"reshard": ours, "torch": torchs})


def measure_verl(bench: Bench) -> None:
    """A model's files of eight ranks to one that `from_pretrained` loads."""
    work = bench.places["disk"]
    source, specification = work / "verl", work / "verl.json"
    config, shapes = llama(bench.gigabytes * 1e9)
    say("writing the files of ranks")
    specification.write_text(json.dumps({f"model.{name}": shape for name, shape in shapes.items()}))
    run(script("rank_files.py", "write", specification, RANKS, source))
    (source / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": RANKS}))
    (source / "huggingface").mkdir()
    # verl's merger refuses a model without a tokenizer.
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
    }
    files = {
        "config": config,
        "tokenizer": tokenizer,
        "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast"},
    }
    for name, content in files.items():
        (source / "huggingface" / f"{name}.json").write_text(json.dumps(content))

    def verls(destination: Path) -> Command:
        options = ("--backend", "fsdp", "--local_dir", source, "--target_dir", destination)
        return [sys.executable, "-m", "verl.model_merger", "merge", *options]

    def ours(destination: Path) -> Command:
        return _convert(source, destination, "--only", "model", "--to", "safetensors", "--dtype", "bf16")

    ways = {"reshard": ours, "verl": verls}
    _contest(bench, "verl", f"{RANKS} files -> Hugging Face", source, ways, "verl.model_merger.fsdp_model_merger")


def measure_deepspeed(bench: Bench) -> None:
    """ZeRO stage 2 of four ranks to weights in fp32, and to all of the state."""
    work = bench.places["disk"]
    folder, specification = work / "deepspeed", work / "deepspeed.json"
    # Beside fp32 masters and two moments there are bf16 weights.
    shapes = transformer(bench.gigabytes * 1e9 * 3 / 3.5)
    weights = {key.removeprefix("model."): shape for key, shape in shapes.items() if key.startswith("model.")}
    say("writing a checkpoint with DeepSpeed")
    specification.write_text(json.dumps(weights))
    run(torchrun(4, script("deepspeed_files.py", specification, 2, folder)))
    tag = folder / "global_step1"

    def to_fp32(destination: Path) -> Command:
        return [sys.executable, "-m", "deepspeed.utils.zero_to_fp32", folder, destination, "--safe_serialization"]

    def our_weights(destination: Path) -> Command:
        return _convert(folder, destination, "--only", "model", "--to", "safetensors")

    def to_universal(destination: Path) -> Command:
        # One process each: more are slower here, and their memory would not be counted.
        workers = ("--num_extract_workers", 1, "--num_merge_workers", 1)
        options = ("--input_folder", tag, "--output_folder", destination, "--inject_missing_state", *workers)
        return [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *options]

    def ours(destination: Path) -> Command:
        return _convert(folder, destination, "--world-size", NEW_RANKS)

    ways = {"reshard-weights": our_weights, "zero_to_fp32": to_fp32}
    imports = "deepspeed.utils.zero_to_fp32"
    try:
        _contest(bench, "deepspeed", "ZeRO-2 -> fp32 weights", folder, ways, imports, keep=True)
    finally:
        ways = {"reshard-all": ours, "ds_to_universal": to_universal}
        _contest(bench, "deepspeed", "ZeRO-2 -> all", folder, ways, "deepspeed.checkpoint.ds_to_universal")


def _convert(source: Path, destination: Path, *options: object) -> Command:
    return [*RESHARD, "convert", source, destination, *options, "--json"]


def _contest(
    bench: Bench, section: str, case: str, source: Path, ways: Mapping[str, Way], imports: str = "", keep: bool = False
) -> None:
    """Compares what comes of two ways, then measures them; the source is removed unless it is to be kept."""
    work = bench.places["disk"]
    try:
        first, second = (work / f"{name}-compared" for name in ways)
        say("comparing what comes of them")
        try:
            for destination, way in zip((first, second), ways.values(), strict=True):
                run(way(destination))
            run(script("rank_files.py", "compare", first, second))
        finally:
            remove(first)
            remove(second)
        length = folder_bytes(source)
        contenders = {name: Contender(way(work / DESTINATION), moved_bytes=length) for name, way in ways.items()}
        if imports:
            contenders["imports"] = Contender([sys.executable, "-c", f"import {imports}"])
        bench.contest(section, case, "disk", contenders, warm=[source])
    finally:
        if not keep:
            remove(source)


SECTIONS: dict[str, Section] = {"ranks": measure_ranks, "verl": measure_verl, "deepspeed": measure_deepspeed}


def main() -> int:
    """Measures; exit 0 whether goals are met or not, 1 if something could not be measured."""
    args = options(__doc__, SECTIONS, gigabytes=1.0).parse_args()
    return report(measure(args, SECTIONS, GOALS), COLUMNS)


if __name__ == "__main__":
    run_main(main)
