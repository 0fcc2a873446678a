// Tensors, in the vocabulary of the Open Inference Protocol: row-major, little-endian on the wire, as
// typed arrays are on all machines that JavaScript runs on.

// The array of each datatype; those of FP16 and BF16 hold bits.
const ARRAYS = {
  BOOL: Uint8Array,
  UINT8: Uint8Array,
  UINT16: Uint16Array,
  UINT32: Uint32Array,
  UINT64: BigUint64Array,
  INT8: Int8Array,
  INT16: Int16Array,
  INT32: Int32Array,
  INT64: BigInt64Array,
  FP16: Uint16Array,
  BF16: Uint16Array,
  FP32: Float32Array,
  FP64: Float64Array,
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

// Bits of the fraction, and the exponent of the smallest normal number.
const HALVES: Readonly<Record<string, readonly [number, number]>> = { FP16: [10, -14], BF16: [7, -126] };
const PREFIX = 4; // bytes before each element of BYTES: its length

/** A tensor: its elements in row-major order, as the datatype's array or a list. Without a shape it has one axis. */
export class Tensor<D extends Datatype = Datatype> {
  readonly shape: readonly number[];
  readonly data: TensorData<D>;

  constructor(readonly datatype: D, data: TensorData<D> | readonly TensorElement[], shape?: readonly number[]) {
    if (datatype !== "BYTES" && !Object.hasOwn(ARRAYS, datatype)) {
      throw new TypeError(`${String(datatype)} is no datatype; there are ${Object.keys(ARRAYS).join(", ")} and BYTES`);
    }
    const isDone = datatype !== "BYTES" && data instanceof ARRAYS[datatype as Numeric];
    this.data = (isDone ? data : convert(datatype, data as readonly TensorElement[])) as TensorData<D>;
    this.shape = shape ?? [data.length];
    if (!this.shape.every((n) => Number.isSafeInteger(n) && n >= 0) || sizeOf(this.shape) !== data.length) {
      throw new RangeError(`${data.length} elements do not make the shape [${this.shape.join(", ")}]`);
    }
  }

  /** The elements as lists nested as the shape: numbers, of INT64 and UINT64 bigints, booleans, or bytes. */
  toArray(): Nested {
    let rows: Nested[] = this.elements();
    for (let axis = this.shape.length - 1; axis > 0; axis--) {
      const [elements, n] = [rows, this.shape[axis]!];
      const count = sizeOf(this.shape.slice(0, axis));
      rows = Array.from({ length: count }, (_, i) => elements.slice(i * n, (i + 1) * n));
    }
    return this.shape.length === 0 ? rows[0]! : rows;
  }

  /** The elements of a tensor of BYTES as text, in row-major order. */
  texts(): string[] {
    if (this.datatype !== "BYTES") {
      throw new TypeError(`the tensor is ${this.datatype}, not BYTES`);
    }
    return (this.data as readonly Uint8Array[]).map((element) => new TextDecoder().decode(element));
  }

  /** The datatype, the shape and the first elements; bytes as text, or in hex if they are none. */
  toString(): string {
    const most = 50;
    const isCut = this.data.length > most;
    const first = isCut ? new Tensor(this.datatype, this.data.slice(0, most) as TensorData<D>) : this;
    return `${this.datatype}[${this.shape.join(", ")}] ${write(first.toArray())}${isCut ? "..." : ""}`;
  }

  /** The form of JSON, for JSON.stringify; numbers that JSON has not are text, bytes as in toString. */
  toJSON(): { datatype: D; shape: readonly number[]; data: readonly (number | boolean | string)[] } {
    return { datatype: this.datatype, shape: this.shape, data: this.elements().map(jsonOf) };
  }

  private elements(): TensorElement[] {
    const half = HALVES[this.datatype];
    const all: TensorElement[] = Array.from(this.data as ArrayLike<TensorElement>);
    if (half !== undefined) {
      return all.map((bits) => fromHalf(bits as number, ...half));
    }
    return this.datatype === "BOOL" ? all.map(Boolean) : all;
  }
}

/** Returns elements as text. JSON has no bigints, no NaN, and another form of a Buffer. */
function write(value: Nested): string {
  if (Array.isArray(value)) {
    return `[${value.map(write).join(",")}]`;
  }
  return value instanceof Uint8Array ? JSON.stringify(textOf(value)) : String(value);
}

function jsonOf(one: TensorElement): number | boolean | string {
  if (typeof one === "boolean" || typeof one === "string") {
    return one;
  }
  if (one instanceof Uint8Array) {
    return textOf(one);
  }
  const isNumber = typeof one === "bigint" ? Number.isSafeInteger(Number(one)) : Number.isFinite(one);
  return isNumber ? Number(one) : String(one);
}

function textOf(bytes: Uint8Array): string {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch {
    const hex = Array.from(bytes.subarray(0, 16), (one) => one.toString(16).padStart(2, "0")).join(" ");
    return `${bytes.length} bytes: ${hex}${bytes.length > 16 ? " ..." : ""}`;
  }
}

function sizeOf(shape: readonly number[]): number {
  return shape.reduce((product, n) => product * n, 1);
}

/** Returns what holds the elements; throws RangeError for what is none of the datatype. */
function convert(datatype: Datatype, elements: readonly TensorElement[]): TensorData {
  if (datatype === "BYTES") {
    if (elements.some((one) => typeof one !== "string" && !(one instanceof Uint8Array))) {
      throw new RangeError("the elements of BYTES are text or bytes");
    }
    return elements.map((one) => (typeof one === "string" ? new TextEncoder().encode(one) : one)) as Uint8Array[];
  }
  const out: { [index: number]: number | bigint } = new ARRAYS[datatype](elements.length);
  const isBig = datatype === "INT64" || datatype === "UINT64";
  const half = HALVES[datatype];
  const isInteger = half === undefined && !datatype.startsWith("FP");
  elements.forEach((one, i) => {
    const isNumber = typeof one === "number" || typeof one === "bigint" || typeof one === "boolean";
    const isWhole = isNumber && (!isInteger || Number.isInteger(Number(one)));
    const number = !isWhole || (datatype === "BOOL" && Number(one) > 1) ? undefined : isBig ? BigInt(one) : Number(one);
    if (number !== undefined) {
      out[i] = half === undefined ? number : toHalf(number as number, ...half);
    }
    if (number === undefined || (isInteger && out[i] !== number)) {
      throw new RangeError(`${String(one)} is no element of ${datatype}`);
    }
  });
  return out as TensorData;
}

/** Returns the bits of the number nearest to x; of two, of that whose last bit is 0. */
function toHalf(x: number, bits: number, lowest: number): number {
  const sign = x < 0 || Object.is(x, -0) ? 0x8000 : 0;
  const infinity = 0x8000 - 2 ** bits;
  if (Number.isNaN(x)) {
    return infinity + 2 ** (bits - 1);
  }
  const high = new DataView(new ArrayBuffer(8));
  high.setFloat64(0, Math.abs(x));
  const exponent = Math.max(lowest, (high.getUint16(0) >> 4) - 1023);
  const scaled = Math.abs(x) / 2 ** (exponent - bits);
  const floor = Math.floor(scaled);
  const rounded = floor + (scaled - floor > 0.5 || (scaled - floor === 0.5 && floor % 2 === 1) ? 1 : 0);
  return sign + Math.min(infinity, (exponent - lowest) * 2 ** bits + rounded);
}

function fromHalf(value: number, bits: number, lowest: number): number {
  const sign = value & 0x8000 ? -1 : 1;
  const exponent = (value & 0x7fff) >> bits;
  const fraction = value & (2 ** bits - 1);
  if (exponent === 2 ** (15 - bits) - 1) {
    return fraction === 0 ? sign * Infinity : NaN;
  }
  return exponent === 0
    ? sign * fraction * 2 ** (lowest - bits)
    : sign * (2 ** bits + fraction) * 2 ** (exponent - 1 + lowest - bits);
}

/** Returns a tensor of one axis over a typed array; throws TypeError if it is none of a datatype. */
export function tensorOfArray(array: ArrayBufferView): Tensor {
  const [datatype] = Object.entries(ARRAYS).find(([, Kind]) => array instanceof Kind) ?? [array.constructor.name];
  return new Tensor(datatype as Datatype, array as TensorData);
}

/** Returns the bytes of a tensor as they travel. */
export function encodeTensor(tensor: Tensor): Uint8Array {
  const { data } = tensor;
  if (!Array.isArray(data)) {
    const { buffer, byteOffset, byteLength } = data as Uint8Array;
    return new Uint8Array(buffer, byteOffset, byteLength);
  }
  const out = new Uint8Array(data.reduce((sum: number, element: Uint8Array) => sum + PREFIX + element.length, 0));
  let at = 0;
  for (const element of data as readonly Uint8Array[]) {
    new DataView(out.buffer).setUint32(at, element.length, true);
    out.set(element, at + PREFIX);
    at += PREFIX + element.length;
  }
  return out;
}

/** Returns a tensor of an answer; throws RangeError or TypeError if it is none. */
export function decodeTensor(datatype: string, shape: readonly number[], raw: Uint8Array): Tensor {
  if (datatype !== "BYTES") {
    const Kind = ARRAYS[datatype as Numeric] as typeof Uint8Array | undefined;
    const size = Kind?.BYTES_PER_ELEMENT ?? 1;
    if (raw.length % size !== 0) {
      throw new RangeError(`${raw.length} bytes are no elements of ${datatype}`);
    }
    const { buffer, byteOffset } = raw.byteOffset % size === 0 ? raw : raw.slice();
    const data = Kind === undefined ? [] : new Kind(buffer, byteOffset, raw.length / size);
    return new Tensor(datatype as Datatype, data, shape);
  }
  const elements: Uint8Array[] = [];
  const view = new DataView(raw.buffer, raw.byteOffset, raw.byteLength);
  for (let at = 0; at < raw.length; ) {
    const end = at + PREFIX + (at + PREFIX <= raw.length ? view.getUint32(at, true) : raw.length);
    if (end > raw.length) {
      throw new RangeError("an element of BYTES is cut off");
    }
    elements.push(raw.subarray(at + PREFIX, end));
    at = end;
  }
  return new Tensor("BYTES", elements, shape);
}
