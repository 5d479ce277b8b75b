"""Promotion rules of our own above a model registry that has none: compare-and-set, audit, rollback, chain.

A promotion happens under a lock of the operating system beside the audit log in the runs folder: the
alias is read again, compared with what the caller saw, the bundle is checked byte by byte, the alias
is set and one audit line is written. (The lock holds for one machine; promoters on several machines
that share a server must share the runs folder too.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from gem.errors import GateError, GemError, TrackingError
from gem.lineage.audit import AuditEntry, AuditLog, champions_before
from gem.lineage.bundle import read_bundle
from gem.lineage.chain import ChainRecord, walk
from gem.lineage.files import locked
from gem.lineage.gates import Decision

CHAMPION = "champion"


@dataclass(frozen=True)
class ModelVersion:
    """One registered bundle. `version` is text; `source` is where MLflow says the bundle lies."""

    name: str
    version: str
    source: str
    run_id: str
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def bundle_hash(self) -> str:
        return self.tags.get("bundle_hash", "")


class Promotion(ABC):
    """Who is champion, and why. The registry below it only stores versions and aliases."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs.absolute()
        self.audit = AuditLog(self.runs / "audit.jsonl")

    @abstractmethod
    def version(self, name: str, version: str) -> ModelVersion:
        """One version by number or alias. Raises TrackingError if there is none."""

    @abstractmethod
    def champion(self, name: str) -> ModelVersion | None:
        """The version that the alias `champion` names, or None."""

    @abstractmethod
    def bundle_path(self, version: ModelVersion) -> Path:
        """Folder of a version's bundle on this machine, not yet verified. Raises TrackingError."""

    @abstractmethod
    def _set_alias(self, name: str, version: str) -> None:
        """Point the alias `champion` at a version; "" removes it."""

    @abstractmethod
    def _with_hash(self, bundle_hash: str) -> list[ModelVersion]:
        """Registered versions of the bundle with this hash."""

    def _verified(self, version: ModelVersion) -> None:
        """Raise GateError unless the bundle of a version exists and is, byte by byte, the registered one."""
        try:
            if not version.bundle_hash:
                raise TrackingError("it carries no tag bundle_hash; register it with this platform")
            info, _ = read_bundle(self.bundle_path(version), expected_hash=version.bundle_hash)
            if info.name != version.name:
                raise TrackingError(f'its bundle is of model "{info.name}"')
        except GemError as e:
            raise GateError(f"{version.name} version {version.version} cannot become champion: {e}") from e

    def promote(
        self, name: str, version: str, expected_current: str | None, decision: Decision, who: str = ""
    ) -> AuditEntry:
        """Make `version` champion if the champion still is `expected_current` (None or "" = there is none).

        Raises GateError if the decision refuses, if another promotion was faster (naming the champion), or
        if the bundle is missing or changed. Exactly one audit line is written per change.
        """
        if not decision.promote:
            raise GateError(f"{name} version {version} is not promoted: {'; '.join(decision.reasons)}")
        target = self.version(name, str(version))
        with locked(self.runs / "audit.lock"):
            current = self._current(name)
            if current != (str(expected_current) if expected_current else ""):
                raise GateError(
                    f"{name}: the champion is version {current or 'none'}, expected {expected_current or 'none'}; "
                    "another promotion was faster. Evaluate against the champion and try again"
                )
            if current == target.version:
                raise GateError(f"{name}: version {current} is the champion already")
            return self._change(target, current, "promote", decision.reasons, who)

    def rollback(self, name: str, why: str, who: str = "") -> AuditEntry:
        """Make the champion before the present one champion again. GateError if there is none or it is broken."""
        with locked(self.runs / "audit.lock"):
            current = self._current(name)
            before = champions_before(self.audit.read(name))
            if not before:
                raise GateError(f"{name}: the audit log {self.audit.path} knows no champion before {current or 'none'}")
            return self._change(self.version(name, before[-1]), current, "rollback", (why,), who)

    def _current(self, name: str) -> str:
        """Version of the champion or "". A change made around this platform is written down as "observed"."""
        found = self.champion(name)
        current = found.version if found else ""
        history = self.audit.read(name)
        believed = history[-1].to_version if history else ""
        if current != believed:
            reason = "the alias was changed without this platform, or it stopped between change and audit line"
            seen = found.bundle_hash if found else ""
            self.audit.append(AuditEntry(name, believed, current, seen, (reason,), action="observed"))
        return current

    def _change(
        self, target: ModelVersion, current: str, action: str, reasons: tuple[str, ...], who: str
    ) -> AuditEntry:
        self._verified(target)
        entry = AuditEntry(target.name, current, target.version, target.bundle_hash, reasons, action, who)
        self._set_alias(target.name, target.version)
        try:
            return self.audit.append(entry)
        except TrackingError:
            self._set_alias(target.name, current)
            raise

    def chain(self, name: str, version: str = CHAMPION) -> list[ChainRecord]:
        """Data, features, teacher, student, deployment of a version (number or alias), oldest first.

        Links that are broken on disk carry a `problem`; only an unknown model or version raises (TrackingError).
        """
        served = self.version(name, version)
        roots = (self.runs, self.runs.parent)
        try:
            models = walk(self.bundle_path(served), served.bundle_hash or None, roots)
        except TrackingError as e:
            models = [ChainRecord("model", name, served.bundle_hash, served.source, problem=str(e))]
        models = [self._with_run(r) if r.step in ("teacher", "student") else r for r in models]
        return [*models, self._deployment(served)]

    def _with_run(self, record: ChainRecord) -> ChainRecord:
        """Add version and run id of the registered version that has this record's hash."""
        if not record.hash:
            return record
        known = self._with_hash(record.hash)
        if not known:
            return record
        facts = {"version": known[0].version, "run": known[0].run_id}
        return replace(record, facts={**record.facts, **{k: v for k, v in facts.items() if v}})

    def _deployment(self, served: ModelVersion) -> ChainRecord:
        champion = self.champion(served.name)
        alias = CHAMPION if champion and champion.version == served.version else "none"
        facts: dict[str, Any] = {"version": served.version, "alias": alias, "dataset": served.tags.get("dataset", "")}
        lines = [e for e in self.audit.read(served.name) if e.to_version == served.version]
        if lines:
            last = asdict(lines[-1])
            facts |= {k: last[k] for k in ("action", "utc", "who", "reasons")}
            facts["from version"] = last["from_version"] or "none"
        return ChainRecord("deployment", served.name, served.bundle_hash, served.source, facts)
