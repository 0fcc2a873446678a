package clientgen

import (
	_ "embed" // the templates
	"strings"

	"github.com/stagemesh/stagemesh/internal/openapi"
	"github.com/stagemesh/stagemesh/mesh/payload"
)

//go:embed python.tmpl
var pythonTemplate string

//go:embed typescript.tmpl
var typescriptTemplate string

// Python returns a client in Python, for Python 3.9. With numpy, tensors are typed as its arrays.
func Python(m Mesh, numpy bool) ([]byte, error) {
	return language{
		name: "Python", template: pythonTemplate, escape: strings.NewReplacer(`\`, `\\`, `"`, `\"`),
		reserved: `False None True and as assert async await break class continue def del elif else except finally for from global if
			import in is lambda nonlocal not or pass raise return try while with yield
			Answer Any AsyncMesh AsyncStream Bytes Chunk Document Mapping Mesh NDArray Optional Part Stream TYPE_CHECKING Tensor Text
			TypedAsyncStream TypedStream Union annotations answer bytes chunk classmethod cls dataclass inputs mesh np of str`,
		input: func(p openapi.Part) string {
			switch {
			case p.Any:
				return "Any"
			case p.IsTensor():
				return pythonTensor(p, numpy, true)
			case takes(p, payload.JSONType) && takes(p, textType):
				return "Union[Document, Text]"
			case takes(p, payload.JSONType):
				return "Document"
			case takes(p, textType):
				return "Text"
			}
			return "Bytes"
		},
		output: func(p openapi.Part) string {
			if p.IsTensor() {
				return pythonTensor(p, numpy, false)
			}
			of := blobTypes(p, "str", "Any", "bytes", "Any")
			if strings.Contains(of, "Any") {
				return "Any"
			}
			if strings.Contains(of, "|") {
				return "Union[" + strings.ReplaceAll(of, " | ", ", ") + "]"
			}
			return of
		},
	}.write(m, numpy)
}

// The types of numpy for the elements of tensors. It has none for BF16, whose bits it takes.
var numpyTypes = map[string]string{
	"BOOL": "bool_", "INT8": "int8", "INT16": "int16", "INT32": "int32", "INT64": "int64", "UINT8": "uint8", "UINT16": "uint16",
	"UINT32": "uint32", "UINT64": "uint64", "FP16": "float16", "BF16": "uint16", "FP32": "float32", "FP64": "float64", "BYTES": "object_",
}

// pythonTensor returns the type of a tensor that is sent or received.
func pythonTensor(p openapi.Part, numpy, isSent bool) string {
	element := numpyTypes[p.Datatype]
	array := "NDArray[np." + element + "]"
	switch {
	case !numpy || element == "":
		return "Tensor"
	case !isSent:
		return array
	case p.Datatype == "BYTES":
		array += ", NDArray[np.bytes_], NDArray[np.str_]"
	}
	return "Union[" + array + ", Tensor]"
}

// TypeScript returns a client in TypeScript, over the package @stagemesh/client.
func TypeScript(m Mesh) ([]byte, error) {
	tensor := func(p openapi.Part) string {
		datatype, _ := literal(p.Datatype) // a string has no error
		return "Tensor<" + datatype + ">"
	}
	return language{
		name: "TypeScript", template: typescriptTemplate, escape: strings.NewReplacer("*/", "*\\/"), keepsNames: true,
		reserved: `any arguments as async await boolean break case catch class const continue debugger declare default delete do else
			enum eval export extends false finally for from function get if implements import in instanceof interface let namespace
			new null number object of package private protected public return set static string super switch symbol this throw true
			try type typeof undefined unknown var void while with yield
			Answer ArrayBuffer Blob Exclude Input Inputs Json Mesh Options Partial Promise Stream Tensor Uint8Array Value inputs mesh options`,
		input: func(p openapi.Part) string {
			of := "Uint8Array | ArrayBuffer | Blob"
			switch {
			case p.Any:
				return "Input"
			case p.IsTensor():
				return tensor(p)
			case takes(p, payload.JSONType) && takes(p, textType):
				of += " | Json"
			case takes(p, payload.JSONType):
				of += " | Exclude<Json, string>" // a string is sent as text
			case takes(p, textType):
				of += " | string"
			}
			return of
		},
		output: func(p openapi.Part) string {
			if p.IsTensor() {
				return tensor(p)
			}
			return blobTypes(p, "string", "Json", "Uint8Array", "Value")
		},
	}.write(m, false)
}
