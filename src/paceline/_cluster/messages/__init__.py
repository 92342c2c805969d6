"""The messages of the REST API, shared by runner, master and client.

Import from the modules. Those named after a subject, such as `experiments`, `trials` and `metrics`,
have pydantic models, for people and programs; `states` has enumerations, and `base` the common
parts. `attempts`, `node_runners` and `runs` have plain structs, which load fast: between a runner
and the master, a node's runner and the master, and for runs that were made without a master."""
