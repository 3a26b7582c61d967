"""What a training tells of itself, as a dictionary and as a page."""

from __future__ import annotations

import json
import os
import tempfile
from html import escape
from typing import Any, Dict, Optional

from .. import _core
from .._files import write_text
from ._settings import PathLike

# Of a drive that was measured before the run: the engine of a module measures none.
_UNMEASURED = ("io_read_bandwidth_bytes_per_s", "io_write_bandwidth_bytes_per_s")
_AT_START = ("predicted_at_start_step_seconds", "predicted_at_start_clipped_step_seconds")
_PREDICTED = ("predicted_step_seconds", "predicted_unclipped_step_seconds", "predicted_clipped_step_seconds", "predicted_floor_seconds", "predicted_clipped_floor_seconds", "prediction_from", "bound_by")


class Report(Dict[str, Any]):
    """A dictionary with the keys of ``penstock train --report`` (docs/report.md) that mean something here.

    Bytes, seconds, and for each step of this process loss, norm, bytes, seconds and tokens. What is predicted goes by the first forward and
    what is assumed of the drive (``prediction_from`` "start") until the first steps are over; None where nothing trains. A notebook shows it as the page of ``html()``.
    """

    @staticmethod
    def of(text: str, device: Optional[Dict[str, Any]] = None, product_flops_per_second: float = 0.0) -> "Report":
        """device: what a device says of itself (DeviceMemory.report), or of torch's tensors there beside the engine's blocks; None: nothing.

        product_flops_per_second: what the best product of matrices reached on a rank; 0: not measured.
        """
        told = json.loads(text)
        if product_flops_per_second > 0:
            share = told.get("model_flops_per_second", 0.0) / (product_flops_per_second * told["world_size"])
            told["product_flops_per_second"] = product_flops_per_second
            told["mfu"] = share if 0 < share <= 1 else None  # the product was disturbed, or no step is over
        if device is not None and "tensors_peak_bytes" in device:  # torch's, beside the engine's
            told["peak_device_bytes"] += device["tensors_peak_bytes"]
        elif device is not None:
            copied = ("h2d_bytes", "d2h_bytes")
            pinned = max(told["peak_pinned_bytes"], device["peak_pinned_bytes"])  # by the engine, by the device
            told.update({name: value for name, value in device.items() if name not in copied}, peak_pinned_bytes=pinned)
            told["totals"].update({name: device[name] for name in copied})
        for name in _UNMEASURED:
            told.pop(name, None)
        if not told.get(_AT_START[0]):
            told.update(dict.fromkeys((*_PREDICTED, *_AT_START)))
        return Report(told)

    def html(self, path: Optional[PathLike] = None, rated_bytes_written: float = 600e12) -> str:
        """The page that ``penstock report`` makes: one file of HTML that asks nobody for anything.

        path: where it is written as well. rated_bytes_written: what one drive may be written, for its wear.
        """
        with tempfile.TemporaryDirectory() as directory:
            file = os.path.join(directory, "report.json")
            with open(file, "w", encoding="utf-8") as out:
                json.dump({name: value for name, value in self.items() if value is not None or name == "resumed_from_step"}, out)
            page = str(_core.report_page([file], rated_bytes_written))
        if path is not None:
            write_text(path, page)
        return page

    # The page has styles of its own, which are not the notebook's.
    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{escape(self.html(), quote=True)}" style="width: 100%; height: 40em; border: 0"></iframe>'
