"""Compiles the kernels that a distribution ships: matrix.toml -> cubins and manifests in ``artifacts/``. Needs no GPU.

``python -m build_kernels --help``

- ``matrix.toml``  which kernels, as data;  ``matrix.py``  reads and checks it, and narrows it down
- ``pool.py``      worker processes, each with a TileLang of its own
- ``building.py``  what is built, checked and published;  ``__main__.py``  the command
- ``size.py``      the size of a wheel against its budget
"""
