"""``report.html``: what a run's files say, as one page that opens anywhere, without network and without scripts.

``reading`` reads a run folder, ``savings`` and ``limits`` draw conclusions, ``svg`` draws axes and ``charts`` what is
on them, ``page`` is HTML's frame and style, ``sections`` the report of one run and ``compare`` of several; ``write``
puts it into the folder.
"""
