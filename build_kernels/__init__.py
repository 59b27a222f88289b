"""Compiles the kernels that a distribution ships: matrix.toml -> cubins and manifests in ``artifacts/``. Needs no GPU.

``python -m build_kernels --help``

- ``matrix.toml``  which kernels, as data;  ``matrix.py``  reads and checks it, and narrows it down
- ``building.py``  what is built, checked and published, with the worker processes of ``tileops.compiler.pool``
- ``tune.py``      finds schedules by measurement, for the table beside the kernels
- ``__main__.py``  the command
- ``size.py``      the size of a wheel against its budget
"""
