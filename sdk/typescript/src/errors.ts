// Faults of the errors of Connect.

import { Code, ConnectError } from "@connectrpc/connect";
import { Cancelled, Disconnected, faultOfReason, InvalidAnswer } from "./faults.js";
import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "./gen/google/rpc/error_details_pb.js";
import { milliseconds } from "./values.js";

// Causes of failed connections, matched by Node's error code with its system call, or by OpenSSL's message: final (a
// retry does not help), unsent (the gateway cannot have the request) or sent (it may have it), and advice. The first
// match wins. A network that ends, such as by EHOSTUNREACH, leaves a request unsent in the system call connect alone.
const CAUSES: readonly (readonly [RegExp, "final" | "unsent" | "sent", string])[] = [
  [/CERT_HAS_EXPIRED|CERT_NOT_YET_VALID/, "final", "the certificate is not valid now: renew it, or set the clock of this machine"],
  [/ALTNAME_INVALID|HOSTNAME_MISMATCH/, "final", "the certificate is for other names: use one of them in the URL"],
  [
    /^(CERT|CRL|UNABLE_TO)_|SELF_SIGNED|^INVALID_(CA|PURPOSE)|PATH_LENGTH_EXCEEDED/,
    "final",
    "the certificate is not trusted: set NODE_EXTRA_CA_CERTS to the file of its CA, or pass a transport of @connectrpc/connect-node with nodeOptions: { ca }",
  ],
  [/WRONG.VERSION.NUMBER|PACKET.LENGTH.TOO.LONG|RECORD.LAYER.FAILURE/i, "final", "the port does not speak TLS: use http://, or another port"],
  [/ALERT.PROTOCOL|UNSUPPORTED.PROTOCOL|NO.PROTOCOLS/i, "final", "there is no common version of TLS: a gateway takes 1.2 and 1.3"],
  [/NO.APPLICATION.PROTOCOL/i, "final", "the port does not speak this version of HTTP: give the transport another httpVersion"],
  [
    /CERTIFICATE.(REQUIRED|EXPIRED|REVOKED|UNKNOWN)|(BAD|UNSUPPORTED).CERTIFICATE|ACCESS.DENIED|UNKNOWN.CA|HANDSHAKE.FAILURE|NO.SHARED.CIPHER/i,
    "final",
    "the port requires a client certificate, or other ciphers: set them in nodeOptions of a transport of @connectrpc/connect-node",
  ],
  [/before secure TLS/, "unsent", "the connection ended before TLS began: a proxy, or a port of another protocol, may have closed it"],
  [
    /^(ECONNREFUSED|ENOTFOUND|EAI_AGAIN|UND_ERR_CONNECT_TIMEOUT)\b|^E\w+ connect\b/,
    "unsent",
    "look at the host and the port of the URL, and whether the gateway runs",
  ],
  [
    /^(ECONNRESET|EPIPE|UND_ERR_SOCKET|ERR_HTTP2)|http.2 stream closed/,
    "sent",
    "the gateway, or a proxy before it, has ended the connection; if every try fails like this and the port has TLS, use https://",
  ],
  [/^ERR_(SSL|TLS)_/, "final", "TLS fails: compare the settings of both ends"],
];
// Codes of connections that were not made, or broke, and of proxies that had none.
const BROKEN: readonly Code[] = [Code.Unavailable, Code.Aborted, Code.Canceled];

/** Returns the fault of an error of Connect; other errors, which are defects, as they are. */
export function faultOf(error: unknown, signal?: AbortSignal): unknown {
  if (signal?.aborted === true) {
    return new Cancelled("the caller has cancelled the call", { reason: "CANCELLED", cause: signal.reason });
  }
  if (!(error instanceof ConnectError)) {
    return error;
  }
  const code = Code[error.code]!.replace(/(?<=[a-z])(?=[A-Z])/g, "_").toUpperCase().replace("CANCELED", "CANCELLED");
  const info = error.findDetails(ErrorInfoSchema).find((one) => one.domain === "stagemesh");
  if (info !== undefined) {
    const { stage, step, host, request_id: requestId, ...metadata } = info.metadata;
    const delay = error.findDetails(RetryInfoSchema)[0]?.retryDelay;
    const retryAfterMs = delay === undefined ? undefined : milliseconds(delay);
    const violations = error.findDetails(BadRequestSchema).flatMap((one) => one.fieldViolations);
    const details = { reason: info.reason, retryAfterMs, violations, metadata, cause: error };
    return faultOfReason(error.rawMessage, { ...details, stage, step, host, requestId }, code);
  }
  if (error.code === Code.DeadlineExceeded) {
    return faultOfReason("the deadline passed before the answer", { reason: "DEADLINE_EXCEEDED", cause: error });
  }
  const chain: (Error & { code?: unknown; syscall?: unknown })[] = [];
  // Node tries all addresses of a host, and throws an AggregateError if none answers.
  for (let cause: unknown = error; cause instanceof Error && !chain.includes(cause); ) {
    chain.push(cause);
    cause = cause.cause ?? (cause instanceof AggregateError ? (cause.errors[0] as unknown) : undefined);
  }
  // What fetch throws is a TypeError, also where a body breaks off.
  if (!BROKEN.includes(error.code) && !(error.cause instanceof TypeError) && !chain.some((one) => typeof one.code === "string")) {
    return new InvalidAnswer(`no answer of a gateway: ${error.message}; check that the URL has the port of gateway.listen, and https:// if that port has TLS`, error);
  }
  // OpenSSL's message is "<ID>:error:<number>:SSL routines:<function>:<reason>:<place>"; keep the reason.
  const texts = chain.map((one) => one.message.replace(/\w+:error:\w+:[^:]*:[^:]*:([^:]*):[^]*/, "$1").replace(/[:\s]+$/, ""));
  const known = chain.map(({ code: of, syscall = "", message }, i) => `${String(of)} ${String(syscall)} ${/SSL|TLS|http.2/.test(message) ? texts[i]! : ""}`);
  const [, kind, todo] = CAUSES.find(([one]) => known.some((text) => one.test(text))) ?? [, "sent"];
  const metadata = kind === "final" ? { final: "true" } : {};
  const message = `no connection, or it broke: ${texts.slice(chain.length > 1 ? 1 : 0).filter(Boolean).join(": ")}`;
  return new Disconnected(todo === undefined ? message : `${message}; ${todo}`, kind === "sent", { metadata, cause: error });
}
