"""``report.html``: a run's files as one page that opens anywhere, without network and without scripts.

``run_data`` reads a run folder, ``savings`` and ``bottlenecks`` draw conclusions, ``svg`` draws axes and ``charts``
what is on them, ``html`` is the frame and the style, ``sections`` the report of one run and ``compare`` of several.
"""
