"""Measurements that documents cite: accuracy and speed, on a GPU. Never imported by the package."""
