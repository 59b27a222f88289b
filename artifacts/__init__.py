"""The built kernels, as data files. This file makes the folder a package, so that wheels and editable installs carry it."""
