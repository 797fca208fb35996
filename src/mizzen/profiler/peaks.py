"""What devices can do at most: dense 16-bit products with wide sums, in TFLOPS, as their makers say."""

from typing import Final

PEAKS: Final = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "GH200": 989.4,
    "H200": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "H800": 989.4,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 149.7,
    "A10G": 70.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "MI325X": 1307.4,
    "MI300X": 1307.4,
    "MI250X": 191.5,
}
"""By a part of the device's name; the first that fits counts. A MI250X is two devices to torch, and this is one."""


def peak_of(name: str) -> float | None:
    """TFLOPS of a device in 16 bits; None where it is not known."""
    words = name.replace("-", " ").split()
    for known, peak in PEAKS.items():
        if all(word in words for word in known.split()):
            return peak
    return None
