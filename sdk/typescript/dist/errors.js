// Faults of the errors of Connect.
import { Code, ConnectError } from "@connectrpc/connect";
import { Cancelled, Disconnected, faultOfReason, InvalidAnswer } from "./faults.js";
import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "./gen/google/rpc/error_details_pb.js";
import { milliseconds } from "./values.js";
// Codes of Node and OpenSSL: the gateway cannot have the request; it is not trusted.
const UNSENT = /^(ECONNREFUSED|ENOTFOUND|EAI_AGAIN|EHOSTUNREACH|ENETUNREACH|UND_ERR_CONNECT_TIMEOUT)$/;
const UNTRUSTED = /CERT|SELF_SIGNED|UNABLE_TO_|^ERR_(SSL|TLS)/;
// Codes of connections that were not made, or broke, and of proxies that had none.
const BROKEN = [Code.Unavailable, Code.Aborted, Code.Canceled];
/** Returns the fault of an error of Connect; other errors, which are defects, as they are. */
export function faultOf(error, signal) {
    if (signal?.aborted === true) {
        return new Cancelled("the caller has cancelled the call", { reason: "CANCELLED", cause: signal.reason });
    }
    if (!(error instanceof ConnectError)) {
        return error;
    }
    const code = Code[error.code].replace(/(?<=[a-z])(?=[A-Z])/g, "_").toUpperCase().replace("CANCELED", "CANCELLED");
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
    const chain = [];
    for (let cause = error; cause instanceof Error && !chain.includes(cause); cause = cause.cause) {
        chain.push(cause);
    }
    const has = (kind) => chain.some((one) => typeof one.code === "string" && kind.test(one.code));
    // What fetch throws is a TypeError, also where a body breaks off.
    if (!BROKEN.includes(error.code) && !(error.cause instanceof TypeError) && !has(/./)) {
        return new InvalidAnswer(`no answer of a gateway: ${error.message}`, error);
    }
    const isUntrusted = has(UNTRUSTED); // a certificate does not get better
    const texts = chain.slice(chain.length > 1 ? 1 : 0).map((one) => one.message);
    return new Disconnected(`no connection, or it broke: ${texts.join(": ")}`, !isUntrusted && !has(UNSENT), {
        metadata: isUntrusted ? { final: "true" } : {},
        cause: error,
    });
}
