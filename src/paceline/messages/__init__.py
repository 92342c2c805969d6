"""The messages of the REST API, shared by runner, master and client.

Import from the modules: `states` (enumerations), `resources` (pydantic models, for people and
programs; those of `base` and `sign_ins` can be imported from it too), `searches` and `times` (more
of these), `attempts` (plain structs between a runner and the master, which start fast) and `runs`
(plain structs that bring runs made without a master).
"""
