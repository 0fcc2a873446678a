import type { GenEnum, GenFile, GenMessage } from "@bufbuild/protobuf/codegenv2";
import type { Duration } from "@bufbuild/protobuf/wkt";
import type { Message } from "@bufbuild/protobuf";
/**
 * Describes the file stagemesh/inference/v1/payload.proto.
 */
export declare const file_stagemesh_inference_v1_payload: GenFile;
/**
 * Part is one named input or output of a request. An image and a prompt are
 * one request with two parts.
 *
 * @generated from message stagemesh.inference.v1.Part
 */
export type Part = Message<"stagemesh.inference.v1.Part"> & {
    /**
     * Name of the input or output. May be empty where a step takes or gives
     * exactly one part.
     *
     * @generated from field: string name = 1;
     */
    name: string;
    /**
     * @generated from oneof stagemesh.inference.v1.Part.body
     */
    body: {
        /**
         * Opaque bytes with a media type.
         *
         * @generated from field: stagemesh.inference.v1.Blob blob = 2;
         */
        value: Blob;
        case: "blob";
    } | {
        /**
         * A dense tensor.
         *
         * @generated from field: stagemesh.inference.v1.Tensor tensor = 3;
         */
        value: Tensor;
        case: "tensor";
    } | {
        /**
         * A payload that is stored elsewhere in the mesh (claim check). Reserved:
         * refused with NOT_SUPPORTED until claims are served.
         *
         * @generated from field: stagemesh.inference.v1.Ref ref = 4;
         */
        value: Ref;
        case: "ref";
    } | {
        case: undefined;
        value?: undefined;
    };
    /**
     * Parameters of this part alone.
     *
     * @generated from field: map<string, stagemesh.inference.v1.Value> parameters = 5;
     */
    parameters: {
        [key: string]: Value;
    };
};
/**
 * Describes the message stagemesh.inference.v1.Part.
 * Use `create(PartSchema)` to create a new message.
 */
export declare const PartSchema: GenMessage<Part>;
/**
 * Blob is opaque bytes with a media type.
 *
 * @generated from message stagemesh.inference.v1.Blob
 */
export type Blob = Message<"stagemesh.inference.v1.Blob"> & {
    /**
     * Media type, e.g. "image/png". Empty means the only one that the stage declares, else
     * application/octet-stream.
     *
     * @generated from field: string content_type = 1;
     */
    contentType: string;
    /**
     * @generated from field: bytes data = 2;
     */
    data: Uint8Array;
};
/**
 * Describes the message stagemesh.inference.v1.Blob.
 * Use `create(BlobSchema)` to create a new message.
 */
export declare const BlobSchema: GenMessage<Blob>;
/**
 * Tensor is a dense tensor in the vocabulary of the Open Inference Protocol.
 *
 * @generated from message stagemesh.inference.v1.Tensor
 */
export type Tensor = Message<"stagemesh.inference.v1.Tensor"> & {
    /**
     * BOOL, UINT8, UINT16, UINT32, UINT64, INT8, INT16, INT32, INT64, FP16,
     * BF16, FP32, FP64 or BYTES.
     *
     * @generated from field: string datatype = 1;
     */
    datatype: string;
    /**
     * Extent of every axis; axis 0 is rows unless the stage says
     * `batch_axis: none`. Never negative.
     *
     * @generated from field: repeated int64 shape = 2;
     */
    shape: bigint[];
    /**
     * Elements in row-major order, little-endian. BYTES elements each follow
     * their own length as an unsigned 32-bit little-endian integer.
     *
     * @generated from field: bytes raw = 3;
     */
    raw: Uint8Array;
};
/**
 * Describes the message stagemesh.inference.v1.Tensor.
 * Use `create(TensorSchema)` to create a new message.
 */
export declare const TensorSchema: GenMessage<Tensor>;
/**
 * Ref names a payload that is stored in the mesh instead of carried inline.
 *
 * @generated from message stagemesh.inference.v1.Ref
 */
export type Ref = Message<"stagemesh.inference.v1.Ref"> & {
    /**
     * Name of the stored object: <execution>/<hop>/<nonce>.
     *
     * @generated from field: string claim = 1;
     */
    claim: string;
    /**
     * Size of the encoded Part in bytes.
     *
     * @generated from field: uint64 size = 2;
     */
    size: bigint;
    /**
     * SHA-256 of the encoded Part.
     *
     * @generated from field: bytes sha256 = 3;
     */
    sha256: Uint8Array;
};
/**
 * Describes the message stagemesh.inference.v1.Ref.
 * Use `create(RefSchema)` to create a new message.
 */
export declare const RefSchema: GenMessage<Ref>;
/**
 * Value is a parameter's value.
 *
 * @generated from message stagemesh.inference.v1.Value
 */
export type Value = Message<"stagemesh.inference.v1.Value"> & {
    /**
     * @generated from oneof stagemesh.inference.v1.Value.kind
     */
    kind: {
        /**
         * @generated from field: bool bool_value = 1;
         */
        value: boolean;
        case: "boolValue";
    } | {
        /**
         * @generated from field: int64 int64_value = 2;
         */
        value: bigint;
        case: "int64Value";
    } | {
        /**
         * @generated from field: double double_value = 3;
         */
        value: number;
        case: "doubleValue";
    } | {
        /**
         * @generated from field: string string_value = 4;
         */
        value: string;
        case: "stringValue";
    } | {
        /**
         * @generated from field: uint64 uint64_value = 5;
         */
        value: bigint;
        case: "uint64Value";
    } | {
        case: undefined;
        value?: undefined;
    };
};
/**
 * Describes the message stagemesh.inference.v1.Value.
 * Use `create(ValueSchema)` to create a new message.
 */
export declare const ValueSchema: GenMessage<Value>;
/**
 * ModelRef names the model that a step should use, where its stage serves
 * several.
 *
 * @generated from message stagemesh.inference.v1.ModelRef
 */
export type ModelRef = Message<"stagemesh.inference.v1.ModelRef"> & {
    /**
     * @generated from oneof stagemesh.inference.v1.ModelRef.name
     */
    name: {
        /**
         * The model's id: any UTF-8.
         *
         * @generated from field: string model = 1;
         */
        value: string;
        case: "model";
    } | {
        /**
         * A movable name for a model.
         *
         * @generated from field: string alias = 2;
         */
        value: string;
        case: "alias";
    } | {
        case: undefined;
        value?: undefined;
    };
    /**
     * Version of the model; empty means the stage's default.
     *
     * @generated from field: string version = 3;
     */
    version: string;
};
/**
 * Describes the message stagemesh.inference.v1.ModelRef.
 * Use `create(ModelRefSchema)` to create a new message.
 */
export declare const ModelRefSchema: GenMessage<ModelRef>;
/**
 * Timeline says where a request's time went.
 *
 * @generated from message stagemesh.inference.v1.Timeline
 */
export type Timeline = Message<"stagemesh.inference.v1.Timeline"> & {
    /**
     * From admission at the gateway to the reply's arrival there.
     *
     * @generated from field: google.protobuf.Duration total = 1;
     */
    total?: Duration | undefined;
    /**
     * One entry per step that ran, in order.
     *
     * @generated from field: repeated stagemesh.inference.v1.StepTiming steps = 2;
     */
    steps: StepTiming[];
    /**
     * Blocks of the pipeline and their branches, in the order in which they ended; at most 64. Those of
     * the items of a map are one for each status.
     *
     * @generated from field: repeated stagemesh.inference.v1.BranchTiming branches = 3;
     */
    branches: BranchTiming[];
};
/**
 * Describes the message stagemesh.inference.v1.Timeline.
 * Use `create(TimelineSchema)` to create a new message.
 */
export declare const TimelineSchema: GenMessage<Timeline>;
/**
 * BranchTiming is what became of a block, or of a branch of one.
 *
 * @generated from message stagemesh.inference.v1.BranchTiming
 */
export type BranchTiming = Message<"stagemesh.inference.v1.BranchTiming"> & {
    /**
     * Such as look/blur.
     *
     * @generated from field: string path = 1;
     */
    path: string;
    /**
     * Kind of a block: parallel, map, switch, split or try; empty for a branch.
     *
     * @generated from field: string block = 2;
     */
    block: string;
    /**
     * done, skipped, late, failed, cancelled; running in a report of a request in flight.
     *
     * @generated from field: string status = 3;
     */
    status: string;
    /**
     * Value that decided where a branch is skipped or chosen, or reason why it failed.
     *
     * @generated from field: string why = 4;
     */
    why: string;
    /**
     * From the request's admission until it began.
     *
     * @generated from field: google.protobuf.Duration began = 5;
     */
    began?: Duration | undefined;
    /**
     * @generated from field: google.protobuf.Duration took = 6;
     */
    took?: Duration | undefined;
    /**
     * How many there were, in the items of a map; else 0.
     *
     * @generated from field: uint32 count = 7;
     */
    count: number;
    /**
     * Of a map: items, how many failed, and how long they took.
     *
     * @generated from field: uint32 items = 8;
     */
    items: number;
    /**
     * @generated from field: uint32 failed = 9;
     */
    failed: number;
    /**
     * @generated from field: google.protobuf.Duration item_p50 = 10;
     */
    itemP50?: Duration | undefined;
    /**
     * @generated from field: google.protobuf.Duration item_max = 11;
     */
    itemMax?: Duration | undefined;
};
/**
 * Describes the message stagemesh.inference.v1.BranchTiming.
 * Use `create(BranchTimingSchema)` to create a new message.
 */
export declare const BranchTimingSchema: GenMessage<BranchTiming>;
/**
 * StepTiming is what one step of a request cost.
 *
 * @generated from message stagemesh.inference.v1.StepTiming
 */
export type StepTiming = Message<"stagemesh.inference.v1.StepTiming"> & {
    /**
     * @generated from field: string step = 1;
     */
    step: string;
    /**
     * @generated from field: string stage = 2;
     */
    stage: string;
    /**
     * The host that ran it.
     *
     * @generated from field: string host = 3;
     */
    host: string;
    /**
     * Deliveries of this item to hosts of the stage, this one included.
     *
     * @generated from field: uint32 attempt = 4;
     */
    attempt: number;
    /**
     * From the broker's receipt of the item until a host had it, on the
     * broker's clock.
     *
     * @generated from field: google.protobuf.Duration queue_wait = 5;
     */
    queueWait?: Duration | undefined;
    /**
     * From the item's arrival at the host until its batch was dispatched.
     *
     * @generated from field: google.protobuf.Duration batch_wait = 6;
     */
    batchWait?: Duration | undefined;
    /**
     * The runner's time for the whole batch.
     *
     * @generated from field: google.protobuf.Duration run = 7;
     */
    run?: Duration | undefined;
    /**
     * Items in the batch, this one included.
     *
     * @generated from field: uint32 batch_size = 8;
     */
    batchSize: number;
    /**
     * Rows in the batch: what max_size counts.
     *
     * @generated from field: uint32 batch_rows = 9;
     */
    batchRows: number;
    /**
     * Why the batch was dispatched: full, idle, gather, timer, deadline, drain
     * or retry; direct where the item passed no queue.
     *
     * @generated from field: string dispatch_reason = 10;
     */
    dispatchReason: string;
    /**
     * The host got the item in memory, and not from the broker.
     *
     * @generated from field: bool local = 11;
     */
    local: boolean;
    /**
     * From the request's admission until the item arrived at the host, by the
     * clocks of both, which may differ.
     *
     * @generated from field: google.protobuf.Duration arrival = 12;
     */
    arrival?: Duration | undefined;
    /**
     * The part of batch_wait before the item's model was loaded.
     *
     * @generated from field: google.protobuf.Duration model_wait = 13;
     */
    modelWait?: Duration | undefined;
    /**
     * Rows of this item, of those in the batch.
     *
     * @generated from field: uint32 rows = 14;
     */
    rows: number;
    /**
     * Where the step stands in the blocks of its pipeline, such as look/objects/detect; empty in a
     * pipeline without blocks.
     *
     * @generated from field: string path = 15;
     */
    path: string;
};
/**
 * Describes the message stagemesh.inference.v1.StepTiming.
 * Use `create(StepTimingSchema)` to create a new message.
 */
export declare const StepTimingSchema: GenMessage<StepTiming>;
/**
 * Durability says where an item waits between stages.
 *
 * @generated from enum stagemesh.inference.v1.Durability
 */
export declare enum Durability {
    /**
     * The pipeline's own setting, `memory` if it has none.
     *
     * @generated from enum value: DURABILITY_UNSPECIFIED = 0;
     */
    UNSPECIFIED = 0,
    /**
     * In the brokers' memory: fast, lost with them.
     *
     * @generated from enum value: DURABILITY_MEMORY = 1;
     */
    MEMORY = 1,
    /**
     * On the brokers' disks: survives their restart.
     *
     * @generated from enum value: DURABILITY_FILE = 2;
     */
    FILE = 2
}
/**
 * Describes the enum stagemesh.inference.v1.Durability.
 */
export declare const DurabilitySchema: GenEnum<Durability>;
