"""Projects, and the templates and policies for configs in them, as a client sees them."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from paceline.client import _late_models as models
from paceline.client._http_session import HttpSession

if TYPE_CHECKING:
    from paceline.config._config_rules import Rule
    from paceline.config._experiment_config import ExperimentConfig

Kind = Literal["template", "policy"]


class ProjectClient:
    """Calls about projects and their rules."""

    _session: HttpSession

    def create_project(self, name: str) -> "models.Project":
        """Create a project without members."""

        body = models.NewProject.model_validate({"name": name})
        return self._session.call("POST", "projects", models.Project, body=body)

    def list_projects(self) -> "list[models.Project]":
        """Return the projects that the user sees, with the user's roles."""

        return self._session.get("projects", list[models.Project])

    def list_members(self, project: str) -> "list[models.Member]":
        """Return the members of a project and their roles, by name."""

        return self._session.get(f"projects/{quote(project, safe='')}/members", list[models.Member])

    def delete_project(self, project: str) -> None:
        """Delete a project without experiments and models; roles, quota and rules go with it."""
        self._session.send("DELETE", f"projects/{quote(project, safe='')}")

    def config_rules(self, *, project: str | None = None) -> "list[models.ConfigRule]":
        """Return the templates and policies of all projects and of those that the user sees.

        Args:
            project: The project for which they tell whether they apply; by default the one of what
                the user creates.
        """

        return self._session.get("config-rules", list[models.ConfigRule], project=project)

    def set_config_rule(
        self,
        kind: Kind,
        name: str,
        content: dict[str, Any],
        *,
        project: str | None = None,
        revision: int = 0,
    ) -> None:
        """Set a template or a policy for configs.

        Args:
            kind: "template" or "policy".
            name: Its name; the template `default` is one of each experiment.
            content: The fields of a config, or the conditions of a policy.
            project: The project; None for all projects.
            revision: The revision that the change began from; 0 if there is none yet.

        Raises:
            ApiError: `rule_changed` if it was changed since `revision`, `invalid_config` if the
                content is not valid.
        """

        body = models.SetConfigRule(content=content, revision=revision)
        path = f"config-rules/{kind}/{quote(name, safe='')}"
        self._session.send("PUT", path, body=body, params={"project": project})

    def delete_config_rule(
        self, kind: Kind, name: str, *, project: str | None = None, revision: int
    ) -> None:
        """Delete a template or a policy; arguments and errors are those of `set_config_rule`."""
        params = {"project": project, "revision": revision}
        self._session.send("DELETE", f"config-rules/{kind}/{quote(name, safe='')}", params=params)

    def resolve_config(
        self,
        config: "ExperimentConfig | dict[str, Any] | str | Path",
        overrides: Sequence[str] = (),
        *,
        project: str | None = None,
        template: str | None = None,
    ) -> "ExperimentConfig":
        """Return a configuration as an experiment of a project would have it.

        Open fields are taken from `template`, from the templates `default` of the project and of
        all projects, and from what policies fix.

        Args:
            config: The configuration, or the path of a YAML file that holds it.
            overrides: Changes of the configuration, such as "searcher.max_trials=4".
            project: The project; by default the one of what the user creates.
            template: The name of a template.

        Raises:
            ConfigError: It is wrong, or does not meet a policy.
        """
        from paceline.config._config_rules import config_layers, fill_config, policy_problems
        from paceline.config._environment_and_secrets import fill_secrets
        from paceline.config._fields_and_problems import ConfigError
        from paceline.config._validate_config import validate_config

        rules = self._applying(project)
        layers = config_layers(rules, template)
        if not layers:
            checked = load_given_config(config, overrides)
        else:
            filled = fill_config(layers, given_fields(config, overrides))
            checked = validate_config(fill_secrets(filled, os.environ))
        if problems := policy_problems(rules, checked.to_json()):
            raise ConfigError(problems)
        return checked

    def filled_fields(
        self,
        config: "ExperimentConfig | dict[str, Any] | str | Path",
        overrides: Sequence[str] = (),
        *,
        project: str | None = None,
        template: str | None = None,
    ) -> dict[str, str]:
        """Return the fields that `resolve_config` fills in, each with whose they are."""
        from paceline.config._config_rules import config_layers, filled_fields

        layers = config_layers(self._applying(project), template)
        return filled_fields(layers, given_fields(config, overrides))

    def _applying(self, project: str | None) -> "list[Rule]":
        from paceline.config._config_rules import Rule

        return [
            Rule(one.kind, one.name, one.project, one.content)
            for one in self.config_rules(project=project)
            if one.applies
        ]


def given_fields(
    config: "ExperimentConfig | dict[str, Any] | str | Path", overrides: Sequence[str]
) -> dict[str, Any]:
    """Return the fields that a configuration itself gives."""
    from paceline.config._experiment_config import ExperimentConfig
    from paceline.config._read_yaml import apply_overrides, read_yaml_file

    if isinstance(config, ExperimentConfig):
        data = config.model_dump(mode="json", exclude_unset=True)
    else:
        data = config if isinstance(config, dict) else read_yaml_file(Path(config))
    return apply_overrides(data, overrides) if overrides else data


def load_given_config(
    config: "ExperimentConfig | dict[str, Any] | str | Path", overrides: Sequence[str]
) -> "ExperimentConfig":
    """Return a configuration with its overrides, checked alone."""
    from paceline.config._experiment_config import ExperimentConfig
    from paceline.config._validate_config import load_config

    if isinstance(config, ExperimentConfig):
        return load_config(config.to_json(), overrides) if overrides else config
    return load_config(config, overrides)
