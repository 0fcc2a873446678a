package msgpack

import (
	"slices"
	"strings"
)

// Type is the content type of MessagePack.
const Type = "application/msgpack"

// types are the names that it goes by.
var types = []string{Type, "application/x-msgpack", "application/vnd.msgpack"}

// Is reports whether a content type, perhaps with parameters, is MessagePack's.
func Is(contentType string) bool {
	media, _, _ := strings.Cut(contentType, ";")
	return slices.Contains(types, strings.ToLower(strings.TrimSpace(media)))
}
