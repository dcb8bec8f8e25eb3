"""Checks once whether a service is serving: ``python -m hippo.rpc.health_check ADDRESS``.

For containers and orchestrators without a probe of their own. ``HOST:PORT`` is checked through
the standard gRPC health service, ``http://...`` by a GET that must return status 200.
"""

import argparse
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Returns 0 if the service is serving; otherwise 1, with the reason on stderr."""
    parser = argparse.ArgumentParser(prog="python -m hippo.rpc.health_check", description=__doc__)
    parser.add_argument("address", help="HOST:PORT of a gRPC server, or an http URL")
    parser.add_argument("--service", default="", help="gRPC service (default: the whole server)")
    parser.add_argument("--timeout", type=float, default=5.0, help="in seconds")
    parser.add_argument("--tls-ca", help="PEM authority of the server's certificate: use TLS")
    parser.add_argument("--tls-cert", default="", help="PEM certificate, for mutual TLS")
    parser.add_argument("--tls-key", default="", help="PEM private key, for mutual TLS")
    arguments = parser.parse_args(argv)
    if arguments.address.startswith(("http://", "https://")):
        problem = _http_problem(arguments.address, arguments.timeout)
    else:
        problem = _grpc_problem(arguments)
    if problem is None:
        return 0
    sys.stderr.write(f"{arguments.address}: {problem}\n")
    return 1


def _http_problem(url: str, timeout: float) -> str | None:
    # A probe must not go through a proxy from the environment.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout) as response:
            return None if response.status == 200 else f"HTTP status {response.status}"
    except urllib.error.HTTPError as error:
        return f"HTTP status {error.code}"
    except OSError as error:  # includes URLError
        return str(error)


def _grpc_problem(arguments: argparse.Namespace) -> str | None:
    # Imported here, because a probe of the gateway need not wait for gRPC.
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from hippo.errors import InvalidRequestError
    from hippo.rpc.options import NO_PROXY, TlsFiles

    if arguments.tls_ca is None:
        channel = grpc.insecure_channel(arguments.address, options=(NO_PROXY,))
    else:
        files = TlsFiles(arguments.tls_cert, arguments.tls_key, arguments.tls_ca)
        try:
            credentials = files.channel_credentials()
            channel = grpc.secure_channel(arguments.address, credentials, options=(NO_PROXY,))
        except InvalidRequestError as error:
            return error.message
    request = health_pb2.HealthCheckRequest(service=arguments.service)
    with channel:
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=arguments.timeout)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    if response.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
