"""Pictures of tables and runs, for notebooks and reports.

Each function draws on the axes that it is given, or on a new figure, and returns them. matplotlib comes with
``pip install matplotlib`` (the extra ``plot``) and is imported when something is drawn.

Example:
    >>> import numpy as np
    >>> from dsa import plots
    >>> axes = plots.row_norms(np.random.default_rng(0).normal(size=(1000, 8)))
    >>> axes.get_xlabel(), axes.get_ylabel()
    ('Euclidean norm of a row', 'rows')
    >>> from matplotlib import pyplot
    >>> pyplot.close(axes.get_figure())
"""

from dsa.inspection.plots.curves import loss
from dsa.inspection.plots.disk import poincare_disk
from dsa.inspection.plots.spreads import moment_scales, row_norms, touch_counts

__all__ = ["loss", "moment_scales", "poincare_disk", "row_norms", "touch_counts"]
