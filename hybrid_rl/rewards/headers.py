"""Headers of requests to reward services, whose secrets stand in environment variables and nowhere else."""

import re
from collections.abc import Mapping
from string import Template

from hybrid_rl.config import Findings, check

_FIELD = "reward.remote_headers"
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class SecretHeaders:
    """The headers of reward.remote_headers with the values of the environment."""

    def __init__(self, templates: Mapping[str, object], environment: Mapping[str, str]) -> None:
        """Read the variables.

        Args:
            templates: reward.remote_headers; name -> text with names of variables, such as `Bearer $TOKEN`.
            environment: of this process.
        Raises:
            ConfigError: a name cannot be that of a header, a text names no variable, or a variable is not set or does
                not fit into a header; one sentence for each, which shows no value.
        """
        self.values: dict[str, str] = {}
        """Name -> value, with its secrets."""
        self._secrets: set[str] = set()
        findings = Findings()
        for name, text in templates.items():
            findings.run(lambda name=name, text=text: self._add(name, text, environment))  # type: ignore[misc]
        findings.raise_any()

    def hide(self, text: str) -> str:
        """Return a text in which the secrets are replaced, as a service may repeat what it was sent."""
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, "***")
        return text

    def _add(self, name: str, text: object, environment: Mapping[str, str]) -> None:
        check(_NAME.fullmatch(name) is not None, f"{_FIELD}: {name!r} cannot be the name of a header")
        template = Template(text if isinstance(text, str) else "")
        variables = template.get_identifiers() if template.is_valid() else []
        check(
            bool(variables),
            f"{_FIELD}: the value of {name} must name an environment variable, such as Bearer $TOKEN: config.yaml "
            "keeps it as it stands, so that a secret in it would be readable there",
        )
        for variable in variables:
            value = environment.get(variable, "")
            check(bool(value), f"{_FIELD}: {name} needs the environment variable {variable}, which is not set")
            check(
                value.isascii() and value.isprintable(),
                f"{_FIELD}: {name}: the environment variable {variable} holds a line end or another character that no "
                "header can hold",
            )
            self._secrets.add(value)
        self.values[name] = template.substitute(environment)
