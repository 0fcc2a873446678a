// The types of @stagemesh/client, as programs meet them: tsc accepts this file, and finds an error
// where it says that there is one.
import { type Answer, Fault, type Inputs, type JobEvent, Mesh, type Options, type Outcome, Tensor } from "@stagemesh/client";
import { InferRequestSchema } from "@stagemesh/client/gen/stagemesh/inference/v1/inference_pb";

interface DigitsInputs {
  readonly image: Uint8Array | Blob;
  readonly note?: string;
}

type DigitsOutputs = { readonly labels: Tensor<"BYTES">; readonly scores: Tensor<"FP32"> };

// A function per pipeline is what `stagemesh client typescript` makes.
export function digits(mesh: Mesh, inputs: DigitsInputs, options?: Options): Promise<Answer<DigitsOutputs>> {
  return mesh.infer<DigitsOutputs>("digits", { ...inputs }, options);
}

export async function use(mesh: Mesh): Promise<void> {
  const answer = await digits(mesh, { image: new Uint8Array() }, { timeoutMs: 2000, signal: AbortSignal.timeout(10) });
  const labels: readonly Uint8Array[] = answer.get("labels").data;
  const scores: Float32Array = answer.outputs.scores.data;
  const either: Tensor<"BYTES"> | Tensor<"FP32"> = answer.value;
  // @ts-expect-error there is no such output
  answer.get("label");
  // @ts-expect-error the image is missing
  await digits(mesh, {});
  // @ts-expect-error a function is no input
  await mesh.infer("p", { x: () => 1 });
  // @ts-expect-error it is a number of milliseconds
  await mesh.infer("p", { x: 1 }, { timeoutMs: "2s" });
  // @ts-expect-error there is no such datatype
  new Tensor("FP33", [1]);
  // @ts-expect-error the data of FP32 are no Int8Array
  new Tensor("FP32", new Int8Array(1)).data.fill(0n);

  const inputs: Inputs = { a: "text", b: [1, { c: null }], d: Float32Array.of(1), e: new BigInt64Array(1), f: undefined };
  for await (const chunk of mesh.stream<{ word: string }>("words", inputs)) {
    chunk.get("word").toUpperCase();
  }
  for await (const outcome of mesh.inferMany<{ y: number }>("p", [inputs], { inFlight: 2, ordered: false })) {
    const { number }: Outcome<{ y: number }> = outcome;
    const message: string = outcome.fault === undefined ? outcome.answer.get("y").toFixed(number) : outcome.fault.reason;
    console.log(message);
  }
  for await (const event of mesh.jobs.watch("nightly.1")) {
    const one: JobEvent = event;
    console.log(one.kind === "state" ? one.job.state : one.kind === "chunk" ? one.chunk.seq : one.details.attempt);
  }
  try {
    await mesh.result({ pipeline: "p", key: "k" }, { waitMs: 5000 });
    // @ts-expect-error a request has one name
    await mesh.result({ pipeline: "p" });
  } catch (error) {
    const pause: number | undefined = error instanceof Fault ? error.retryAfterMs : undefined;
    console.log(pause, labels, scores, either, InferRequestSchema.typeName);
  }
}
