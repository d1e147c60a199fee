"""The files of a Zarr v3 array as dsa lays them out: shards of inner chunks, with the index at the end."""
