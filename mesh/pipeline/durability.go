package pipeline

import (
	"fmt"

	inferencev1 "github.com/stagemesh/stagemesh/proto/gen/go/stagemesh/inference/v1"
)

// Durability says where an item waits between stages.
type Durability string

// The durabilities. Unset means the pipeline's own, and Memory if it has none.
const (
	DurabilityUnset Durability = ""
	Memory          Durability = "memory"
	File            Durability = "file"
)

// ParseDurability reads "memory", "file" or "".
func ParseDurability(s string) (Durability, error) {
	switch d := Durability(s); d {
	case DurabilityUnset, Memory, File:
		return d, nil
	}
	return "", fmt.Errorf("durability %q: use memory or file", s)
}

// DurabilityFromProto converts a durability from outside.
func DurabilityFromProto(d inferencev1.Durability) (Durability, error) {
	switch d {
	case inferencev1.Durability_DURABILITY_UNSPECIFIED:
		return DurabilityUnset, nil
	case inferencev1.Durability_DURABILITY_MEMORY:
		return Memory, nil
	case inferencev1.Durability_DURABILITY_FILE:
		return File, nil
	}
	return "", fmt.Errorf("durability %d is none of this version's", d)
}

// ToProto converts the durability for the wire.
func (d Durability) ToProto() inferencev1.Durability {
	switch d {
	case Memory:
		return inferencev1.Durability_DURABILITY_MEMORY
	case File:
		return inferencev1.Durability_DURABILITY_FILE
	default:
		return inferencev1.Durability_DURABILITY_UNSPECIFIED
	}
}

// Class is a priority as it is told apart on the wire.
type Class string

// The classes, first served first.
const (
	High   Class = "high"
	Normal Class = "normal"
	Low    Class = "low"
)

// Classes returns all classes, first served first.
func Classes() []Class { return []Class{High, Normal, Low} }

// ClassOf returns the class of a priority: above 0, 0, below 0.
func ClassOf(priority int32) Class {
	switch {
	case priority > 0:
		return High
	case priority < 0:
		return Low
	default:
		return Normal
	}
}
