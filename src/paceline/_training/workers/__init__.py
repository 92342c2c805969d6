"""Workers: processes that carry out calls, locally, on Ray, in an outer launcher.

Also: inline or as programs.
"""
