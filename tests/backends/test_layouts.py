"""The layouts of the package: the suite for each kind and way of storing."""

from dsa.backends import Memmap, Zarr
from dsa.testing import LayoutConformance


class TestMemmap(LayoutConformance):
    def layout(self):
        return Memmap()

    def differing(self):
        return Memmap(stride=1 << 14)


class TestMemmapInPages(LayoutConformance):
    def layout(self):
        return Memmap(stride="page")

    def differing(self):
        return Memmap(stride=1 << 14)


class TestZarr(LayoutConformance):
    def layout(self):
        return Zarr()

    def differing(self):
        return Zarr(compression="zstd")


class TestSmallShards(LayoutConformance):
    def layout(self):
        return Zarr(shard_bytes=1 << 14)

    def differing(self):
        return Zarr(compression="zstd")


class TestCompressed(LayoutConformance):
    def layout(self):
        return Zarr(compression="zstd", shard_bytes=1 << 14, overlay_bytes=1 << 12)

    def differing(self):
        return Zarr()
