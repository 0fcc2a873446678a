package payload

import "strings"

// JSONType is the content type of JSON.
const JSONType = "application/json"

// BareType returns a media type without its parameters, in lower case.
func BareType(contentType string) string {
	out, _, _ := strings.Cut(contentType, ";")
	return strings.ToLower(strings.TrimSpace(out))
}

// IsJSON reports whether a content type is JSON: application/json, or one that ends in
// +json, which is JSON whatever else it is.
func IsJSON(contentType string) bool {
	bare := BareType(contentType)
	return bare == JSONType || strings.HasSuffix(bare, "+json")
}

// AcceptsType reports whether a content type is one that the pattern means, both perhaps
// with parameters and in any case: "image/png", "image/*" or "*/*". What takes
// application/json takes whatever IsJSON.
func AcceptsType(pattern, contentType string) bool {
	got, pattern := BareType(contentType), BareType(pattern)
	if family, ok := strings.CutSuffix(pattern, "*"); ok {
		return family == "*/" || strings.HasPrefix(got, family)
	}
	return got == pattern || pattern == JSONType && IsJSON(got)
}
