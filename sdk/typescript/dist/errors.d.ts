/** Returns the fault of an error of Connect; other errors, which are defects, as they are. */
export declare function faultOf(error: unknown, signal?: AbortSignal): unknown;
