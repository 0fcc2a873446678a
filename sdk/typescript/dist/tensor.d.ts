declare const ARRAYS: {
    BOOL: Uint8ArrayConstructor;
    UINT8: Uint8ArrayConstructor;
    UINT16: Uint16ArrayConstructor;
    UINT32: Uint32ArrayConstructor;
    UINT64: BigUint64ArrayConstructor;
    INT8: Int8ArrayConstructor;
    INT16: Int16ArrayConstructor;
    INT32: Int32ArrayConstructor;
    INT64: BigInt64ArrayConstructor;
    FP16: Uint16ArrayConstructor;
    BF16: Uint16ArrayConstructor;
    FP32: Float32ArrayConstructor;
    FP64: Float64ArrayConstructor;
};
type Numeric = keyof typeof ARRAYS;
export type Datatype = Numeric | "BYTES";
/** What holds the elements of a datatype: a typed array; of FP16 and BF16 it has their bits. */
export type TensorData<D extends Datatype = Datatype> = {
    BOOL: Uint8Array;
    UINT8: Uint8Array;
    UINT16: Uint16Array;
    UINT32: Uint32Array;
    UINT64: BigUint64Array;
    INT8: Int8Array;
    INT16: Int16Array;
    INT32: Int32Array;
    INT64: BigInt64Array;
    FP16: Uint16Array;
    BF16: Uint16Array;
    FP32: Float32Array;
    FP64: Float64Array;
    BYTES: readonly Uint8Array[];
}[D];
export type TensorElement = number | bigint | boolean | string | Uint8Array;
/** An element, or lists of them nested as a shape. */
export type Nested = TensorElement | readonly Nested[];
/** A tensor: its elements in row-major order, as the datatype's array or a list. Without a shape it has one axis. */
export declare class Tensor<D extends Datatype = Datatype> {
    readonly datatype: D;
    readonly shape: readonly number[];
    readonly data: TensorData<D>;
    constructor(datatype: D, data: TensorData<D> | readonly TensorElement[], shape?: readonly number[]);
    /** The elements as lists nested as the shape: numbers, of INT64 and UINT64 bigints, booleans, or bytes. */
    toArray(): Nested;
    /** The elements of a tensor of BYTES as text, in row-major order. */
    texts(): string[];
    /** The datatype, the shape and the first elements; bytes as text, or in hex if they are none. */
    toString(): string;
    /** The form of JSON, for JSON.stringify; numbers that JSON has not are text, bytes as in toString. */
    toJSON(): {
        datatype: D;
        shape: readonly number[];
        data: readonly (number | boolean | string)[];
    };
    private elements;
}
/** Returns a tensor of one axis over a typed array; throws TypeError if it is none of a datatype. */
export declare function tensorOfArray(array: ArrayBufferView): Tensor;
/** Returns the bytes of a tensor as they travel. */
export declare function encodeTensor(tensor: Tensor): Uint8Array;
/** Returns a tensor of an answer; throws RangeError or TypeError if it is none. */
export declare function decodeTensor(datatype: string, shape: readonly number[], raw: Uint8Array): Tensor;
export {};
