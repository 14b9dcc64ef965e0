"""`tunemq doctor` names certificates that expire soon, with the server or the file."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from tests.certificate_server import showing
from tests.support.farms.examined_farm import ExaminedFarm, farm
from tests.support.stores.object_servers import Certificate
from tunemq_scheduler.security.certificate_expiry import Certificate as FarmCertificate
from tunemq_scheduler.security.doctor import certificates as module
from tunemq_scheduler.security.doctor.certificates import check_certificates
from tunemq_scheduler.security.findings import FindingLevel

__all__ = ["farm"]

pytestmark = [pytest.mark.integration, pytest.mark.security]


@pytest.mark.parametrize(
    ("days", "level"),
    [(1, FindingLevel.PROBLEM), (10, FindingLevel.WARNING), (100, FindingLevel.OK)],
)
def test_check_certificates_names_servers_and_files_that_expire_soon(
    tmp_path: Path, days: int, level: FindingLevel
):
    certificate = Certificate(tmp_path / "made", days=days)
    with showing(certificate) as port:
        place = f"127.0.0.1:{port}"
        redis = f"rediss://:secret@{place}/0?ssl_ca_certs={certificate.file}"
        store = f"s3://bucket/farm?endpoint=https://{place}&ca_file={certificate.file}"
        found = check_certificates(redis, store, {})
    assert {one.level for one in found} == {level}
    said = "\n".join(one.what for one in found)
    assert "secret" not in said
    for named in (f"Redis at {place}", f"the store at https://{place}", str(certificate.file)):
        assert named in said
    if level is not FindingLevel.OK:
        assert len(found) == 4
        assert f"expires in {days}.0 days" in said


def test_check_certificates_says_when_one_has_expired(monkeypatch: pytest.MonkeyPatch):
    expired = ssl.SSLCertVerificationError("certificate has expired")
    expired.verify_code = 10

    def refused() -> float:
        raise expired

    made = (
        FarmCertificate("redis", "Redis at farm:6379", refused),
        FarmCertificate("redis_ca", "/etc/ca.crt", lambda: 86400.0),
    )
    monkeypatch.setattr(module, "certificates_of", lambda *_: made)
    server, file = check_certificates("", "", {})
    assert server.level is file.level is FindingLevel.PROBLEM
    assert server.what.startswith("the certificate of Redis at farm:6379")
    assert "has expired" in server.what
    assert "/etc/ca.crt, by which the farm trusts its server, expired at 1970-01-02" in file.what


def test_check_certificates_does_not_judge_a_bundle_of_public_authorities(tmp_path: Path):
    bundle = tmp_path / "bundle.crt"
    made = [Certificate(tmp_path / str(number), days=1) for number in range(11)]
    bundle.write_text("".join(one.file.read_text() for one in made))
    (found,) = check_certificates(f"rediss://127.0.0.1:1/0?ssl_ca_certs={bundle}", "", {})
    assert found.level is FindingLevel.OK


def test_doctor_with_a_store_whose_certificate_expires_within_a_day_finds_a_problem(
    farm: ExaminedFarm, tmp_path: Path
):
    certificate = Certificate(tmp_path / "made", days=1)
    with showing(certificate) as port:
        store = f"s3://bucket/farm?endpoint=https://127.0.0.1:{port}&ca_file={certificate.file}"
        found = farm.examined("--store", store).of("certificates")
    assert [one.level for one in found] == [FindingLevel.PROBLEM] * 2
    assert f"the store at https://127.0.0.1:{port} expires in" in found[0].what
