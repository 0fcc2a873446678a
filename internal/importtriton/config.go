package importtriton

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strconv"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"
)

// config has the fields of a config.pbtxt that matter: MaxBatchSize is max_batch_size. An empty
// struct is a field whose presence alone matters.
type config struct {
	Platform, Backend, DefaultModelFilename string

	MaxBatchSize                                                 int
	Input, Output                                                []tensor
	InstanceGroup                                                []instanceGroup
	DynamicBatching                                              *dynamicBatching
	EnsembleScheduling                                           *ensembleScheduling
	ModelTransactionPolicy                                       struct{ Decoupled bool }
	Parameters, ModelWarmup                                      []struct{}
	SequenceBatching, ResponseCache, VersionPolicy, Optimization *struct{}
}

type (
	tensor struct {
		Name     string
		DataType dataType
		Dims     []int64
		Reshape  *struct{ Shape []int64 }
		Optional bool
	}
	instanceGroup struct {
		Kind  kind
		Count int
		Gpus  []int
	}
	dynamicBatching struct {
		MaxQueueDelayMicroseconds, PriorityLevels int
		PreferredBatchSize                        []int
		PreserveOrdering                          bool
		DefaultQueuePolicy                        *struct{}
	}
	ensembleScheduling struct{ Step []step }
	step               struct {
		ModelName           string
		ModelVersion        int
		InputMap, OutputMap []pair
	}
	pair     struct{ Key, Value string }
	dataType string
	kind     string
)

var enums = map[reflect.Type]string{
	reflect.TypeFor[dataType](): "TYPE_INVALID TYPE_BOOL TYPE_UINT8 TYPE_UINT16 TYPE_UINT32 TYPE_UINT64 TYPE_INT8 TYPE_INT16 TYPE_INT32 TYPE_INT64 TYPE_FP16 TYPE_FP32 TYPE_FP64 TYPE_STRING TYPE_BF16",
	reflect.TypeFor[kind]():     "KIND_AUTO KIND_GPU KIND_CPU KIND_MODEL",
}

// descriptor returns a protobuf message with the fields of config. The text form has names and no
// numbers, so the numbers here are arbitrary.
func descriptor() (protoreflect.MessageDescriptor, error) {
	file := &descriptorpb.FileDescriptorProto{Name: proto.String("config.proto"), Syntax: proto.String("proto2")}
	for of, values := range enums {
		enum := &descriptorpb.EnumDescriptorProto{Name: proto.String(of.Name())}
		for i, value := range strings.Fields(values) {
			enum.Value = append(enum.Value, &descriptorpb.EnumValueDescriptorProto{Name: &value, Number: proto.Int32(int32(i))})
		}
		file.EnumType = append(file.EnumType, enum)
	}
	addMessage(file, "config", reflect.TypeFor[config]())
	built, err := protodesc.NewFile(file, nil)
	if err != nil {
		return nil, err
	}
	return built.Messages().ByName("config"), nil
}

var scalars = map[reflect.Kind]descriptorpb.FieldDescriptorProto_Type{
	reflect.String: descriptorpb.FieldDescriptorProto_TYPE_STRING, reflect.Bool: descriptorpb.FieldDescriptorProto_TYPE_BOOL,
	// JSON has 64-bit numbers in quotes.
	reflect.Int: descriptorpb.FieldDescriptorProto_TYPE_INT32, reflect.Int64: descriptorpb.FieldDescriptorProto_TYPE_INT32,
}

var inner = regexp.MustCompile(`\B[A-Z]`)

func addMessage(file *descriptorpb.FileDescriptorProto, name string, t reflect.Type) {
	message := &descriptorpb.DescriptorProto{Name: &name}
	file.MessageType = append(file.MessageType, message)
	for i := range t.NumField() {
		key, of := strings.ToLower(inner.ReplaceAllString(t.Field(i).Name, "_$0")), t.Field(i).Type
		field := &descriptorpb.FieldDescriptorProto{Name: &key, Number: proto.Int32(int32(i + 1)), Label: descriptorpb.FieldDescriptorProto_LABEL_OPTIONAL.Enum()}
		if of.Kind() == reflect.Slice {
			field.Label = descriptorpb.FieldDescriptorProto_LABEL_REPEATED.Enum()
		}
		if of.Kind() == reflect.Slice || of.Kind() == reflect.Pointer {
			of = of.Elem()
		}
		switch {
		case enums[of] != "":
			field.Type, field.TypeName = descriptorpb.FieldDescriptorProto_TYPE_ENUM.Enum(), proto.String("."+of.Name())
		case of.Kind() == reflect.Struct:
			field.Type, field.TypeName = descriptorpb.FieldDescriptorProto_TYPE_MESSAGE.Enum(), proto.String("."+name+"_"+key)
			addMessage(file, name+"_"+key, of)
		default:
			field.Type = scalars[of.Kind()].Enum()
		}
		message.Field = append(message.Field, field)
	}
}

// model is a folder of the repository.
type model struct {
	config
	// path is its config.pbtxt's, and text what the file says.
	name, path, text string
	// version is the highest one.
	version int
	// stage is the name of its stage, or pipeline. isInner is true if steps follow it in an ensemble,
	// and others are the versions that ensembles ask for instead.
	stage   string
	isInner bool
	others  []int
}

var place = regexp.MustCompile(`^.*\(line (\d+:\d+)\): `)

func readModel(folder string) (*model, error) {
	m := &model{name: filepath.Base(folder), path: filepath.Join(folder, "config.pbtxt"), version: 1}
	text, err := os.ReadFile(m.path)
	if err != nil {
		return nil, fmt.Errorf("%w; write one (Triton shows its own at /v2/models/%s/config), or move the folder out of the repository", err, m.name)
	}
	m.text = string(text)
	described, err := descriptor()
	if err != nil {
		return nil, err
	}
	message := dynamicpb.NewMessage(described)
	if err := (prototext.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(text, message); err != nil {
		return nil, errors.New(m.path + ":" + place.ReplaceAllString(strings.ReplaceAll(err.Error(), "\u00a0", " "), "$1: "))
	}
	data, err := protojson.Marshal(message)
	if err = errors.Join(err, json.Unmarshal(data, &m.config)); err != nil {
		return nil, fmt.Errorf("%s: %w", m.path, err)
	}
	if m.Platform == "ensemble" && m.EnsembleScheduling == nil {
		m.EnsembleScheduling = &ensembleScheduling{}
	}
	entries, err := os.ReadDir(folder)
	for _, entry := range entries {
		if n, err := strconv.Atoi(entry.Name()); err == nil && isFolder(folder, entry) {
			m.version = max(m.version, n)
		}
	}
	return m, err
}

// errorf returns an error with the file and the first line that has the word in quotes.
func (m *model) errorf(word, format string, args ...any) error {
	at := max(0, strings.Index(m.text, `"`+word+`"`))
	return fmt.Errorf("%s:%d: %s", m.path, 1+strings.Count(m.text[:at], "\n"), fmt.Sprintf(format, args...))
}
