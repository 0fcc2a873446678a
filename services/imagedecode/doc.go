// Package imagedecode turns PNG and JPEG images into tensors: decoded, resized
// and normalised.
//
//	decode:
//	  runner:
//	    image_decode:
//	      width: 224
//	      height: 224
//	      channels: rgb            # or grey
//	      layout: chw              # flat, hwc or chw
//	      resample: bilinear       # box, bilinear or nearest
//	      range: [0, 1]            # what black and white become
//	      mean: [0.485, 0.456, 0.406]
//	      std: [0.229, 0.224, 0.225]
//	      max_pixels: 25000000
//	      concurrency: 2
//
// The keys are those of Settings. The runner takes a blob named image and gives
// an FP32 tensor named pixels of one row: [1, H*W*C], [1, H, W, C] or
// [1, C, H, W]. It is the image stretched to the size; nothing is cropped.
//
// The bytes decide what the image is, not the content type that it came with;
// but a content type that names something else than a PNG or JPEG is refused,
// as are bytes that are neither, or are damaged: INVALID_INPUT, for that item
// alone. The image's size is read and held against max_pixels before anything
// of that size is allocated. Decoding takes up to 16 bytes for each of them.
//
// Grey is 0.299 R + 0.587 G + 0.114 B. What is transparent shows black behind
// it. An orientation noted in the image's metadata is not followed, and colour
// profiles are not applied.
//
// Items are decoded one by one on as many goroutines as concurrency says.
package imagedecode
