"""``quire-server quantize``: reads a model directory and writes a quantised one.

Memory holds one layer in float32, the statistics of its inputs (quadratic in their number), the calibration
samples, and briefly the embedding. The directory appears under its name only when it is complete.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, cast

import torch
from torch import Tensor

from quire_server.errors import ConfigError
from quire_server.evaluate import text_windows
from quire_server.layers.quantized.format import TensorSpec
from quire_server.layers.quantized.pack_quantized import Packed
from quire_server.layers.quantized.scaled_8bit import Scaled
from quire_server.model_dir.files import new_directory
from quire_server.models import quantization_config
from quire_server.models.config_fields import ConfigFields
from quire_server.models.decoder import Layer
from quire_server.models.safetensors_file import Writer
from quire_server.quantize import calibration, schemes
from quire_server.quantize.calibrated_layer import CalibratedLayer, ObservedLinear, folds_of
from quire_server.quantize.calibration import Calibration
from quire_server.quantize.schemes import Scheme
from quire_server.quantize.source_model import SourceModel
from quire_server.text.tokenizer import Tokenizer

Say = Callable[[str], object]


@torch.inference_mode()
def run(model_dir: Path, scheme: Scheme, text_file: Path, out: Path, say: Say) -> None:
    """Raises QuireServerError, leaving nothing behind, for an unsuitable model, text or destination."""
    source = SourceModel.open(model_dir)
    job = _Job(source, scheme)
    samples = _samples(source, text_file)
    say(f"calibration: {len(samples)} samples of {len(samples[0])} tokens\n")
    with new_directory(out) as staging:
        job.refuse_lack_of_room(staging)
        document = source.document | {"quantization_config": job.document}
        (staging / "config.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
        source.copy_others(staging)
        with (staging / "model.safetensors").open("wb") as file:
            job.write(file, samples, say)
    share = job.size / job.size_before
    say(f"wrote {out}: {job.size / 1e6:,.0f} MB of weights, {share:.0%} of what they were\n")


def _samples(source: SourceModel, text_file: Path) -> list[list[int]]:
    text = text_windows.read_text(text_file)
    token_ids = Tokenizer.load(source.files.root).encode(text, add_special_tokens=False)
    return calibration.cut(token_ids, source.config.max_position)


class _Job:
    """What is quantised, how it is stored, and the work itself."""

    def __init__(self, source: SourceModel, scheme: Scheme) -> None:
        self._source, self._scheme = source, scheme
        prefixes = [
            part for index in range(source.config.num_layers) for part in _matrices(source.skeleton(index))
        ]
        self._group_size = schemes.group_size(source.config.hidden_size, prefixes) if scheme.has_groups else 0
        self.document = scheme.document(source.config, self._group_size)
        parsed = quantization_config.parse(ConfigFields(self.document))
        assert parsed is not None and isinstance(parsed.weights, Packed | Scaled)
        self._format, self._quantization = parsed.weights, parsed
        self._specs = self._all_specs(name for name, _ in prefixes)

    @property
    def size(self) -> int:
        """Bytes of the new tensors."""
        return _bytes(self._specs.values())

    @property
    def size_before(self) -> int:
        """Bytes of the present tensors."""
        return _bytes(self._source.stored.values())

    def refuse_lack_of_room(self, place: Path) -> None:
        """Raise ConfigError if the volume is too small, before hours of work."""
        free = shutil.disk_usage(place).free
        if free < self.size * 1.05:
            raise ConfigError(
                f"{place.parent} has {free / 1e6:,.0f} MB free, and {self.size / 1e6:,.0f} are needed."
            )

    def write(self, file: BinaryIO, samples: list[list[int]], say: Say) -> None:
        """Write the whole file: layer by layer, then the tensors outside of layers."""
        writer = Writer(file, self._specs)
        text = Calibration(self._source, samples)
        written, count, start = set[str](), self._source.config.num_layers, time.monotonic()
        for index in range(count):
            layer = self._source.layer(index)
            for name, tensor in self._quantised(layer, text).items():
                writer.write(name, tensor)
                written.add(name)
            if index + 1 < count:
                text.advance(layer)
            spent = time.monotonic() - start
            left = spent / (index + 1) * (count - index - 1)
            say(f"layer {index + 1} of {count}, {spent:.0f} s, about {left:.0f} s left\n")
            del layer  # free it before the next layer is read
        for name in self._specs.keys() - written:
            writer.write(name, self._source.tensor(name))
        writer.finish()

    def _quantised(self, layer: Layer, text: Calibration) -> dict[str, Tensor]:
        """The tensors of a layer that change. The layer itself gets the dequantised values, for the layers
        that follow.
        """
        linears = [cast(ObservedLinear, linear) for linear in layer.linears]
        chosen = [linear for linear in linears if all(self._is_quantised(name) for name, _ in linear.parts())]
        text.show(layer, chosen)
        stored: dict[str, Tensor] = {}
        dtype = self._source.dtype
        folds = tuple(folds_of(layer, self._source.config, dtype, stored))
        rounded = self._scheme.quantise(CalibratedLayer(tuple(chosen), folds, dtype, self._group_size))
        for linear, whole in rounded.items():
            linear.forget()
            for prefix, rows in linear.parts():
                zeros = None if whole.zeros is None else whole.zeros[rows]
                part = self._format.store(
                    whole._replace(codes=whole.codes[rows], scales=whole.scales[rows], zeros=zeros)
                )
                linear.weight[rows] = self._format.dequantize(prefix, part)
                stored |= {f"{prefix}.{suffix}": tensor for suffix, tensor in part.items()}
        return stored

    def _is_quantised(self, prefix: str) -> bool:
        return not self._quantization.ignored.has(prefix)

    def _all_specs(self, prefixes: Iterable[str]) -> dict[str, TensorSpec]:
        """Every tensor of the new file."""
        specs = dict(self._source.stored)
        for prefix in prefixes:
            if self._is_quantised(prefix):
                out_size, in_size = specs.pop(f"{prefix}.weight").shape
                for suffix, spec in self._format.tensors(prefix, in_size, out_size).items():
                    is_float = spec.dtype == torch.float32  # means any float type
                    dtype = self._source.dtype if is_float else spec.dtype
                    specs[f"{prefix}.{suffix}"] = TensorSpec(spec.shape, dtype)
        return specs


def _matrices(layer: Layer) -> Iterable[tuple[str, int]]:
    """Prefix and number of inputs of all matrices."""
    for linear in layer.linears:
        watched = cast(ObservedLinear, linear)
        yield from ((prefix, watched.weight.shape[1]) for prefix, _ in watched.parts())


def _bytes(specs: Iterable[TensorSpec]) -> int:
    return sum(torch.Size(spec.shape).numel() * spec.dtype.itemsize for spec in specs)
