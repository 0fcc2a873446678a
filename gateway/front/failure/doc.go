// Package failure is how a fault looks on plain HTTP: the status of its reason
// and a JSON body,
//
//	{"error": {"code": "NOT_FOUND", "reason": "UNKNOWN_PIPELINE", "message": "...",
//	  "request_id"?, "stage"?, "step"?, "host"?, "violations"?: [{"field", "description"}],
//	  "retry_after_ms"?, "metadata"?: {}}}
//
// with the headers Stagemesh-Request-Id where an id was minted and Retry-After,
// in seconds, where a pause is known. docs/faults.md has the table of reasons.
//
// The functions are safe for concurrent use. A caller that no longer listens is
// not told, and that is no error.
package failure
