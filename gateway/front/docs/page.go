package docs

import (
	_ "embed" // the files below
)

// What is ours of the page, and the viewer's as update.sh has packed it. None of it
// is ever written.
var (
	//go:embed page/docs.html
	pageHTML []byte
	//go:embed page/docs.css
	pageStyle []byte
	//go:embed page/docs.js
	pageScript []byte

	//go:embed viewer/swagger-ui.css.gz
	viewerStyle []byte
	//go:embed viewer/swagger-ui-bundle.js.gz
	viewerScript []byte
	//go:embed viewer/LICENSE
	viewerLicense []byte
	//go:embed viewer/NOTICE
	viewerNotice []byte
	//go:embed viewer/swagger-ui-bundle.js.LICENSE.txt
	viewerParts []byte
)

const (
	htmlType   = "text/html; charset=utf-8"
	styleType  = "text/css; charset=utf-8"
	scriptType = "text/javascript; charset=utf-8"
	plainType  = "text/plain; charset=utf-8"
)

// pageFiles are the page and what it is made of, with the viewer's licences, by their
// paths.
func pageFiles() map[string]file {
	return map[string]file{
		PagePath:               plainFile(htmlType, pageHTML),
		PagePath + "/docs.css": plainFile(styleType, pageStyle),
		PagePath + "/docs.js":  plainFile(scriptType, pageScript),
		PagePath + "/LICENSE":  plainFile(plainType, viewerLicense),
		PagePath + "/NOTICE":   plainFile(plainType, viewerNotice),
		PagePath + "/swagger-ui-bundle.js.LICENSE.txt": plainFile(plainType, viewerParts),

		PagePath + "/swagger-ui.css":       packedFile(styleType, viewerStyle),
		PagePath + "/swagger-ui-bundle.js": packedFile(scriptType, viewerScript),
	}
}

func plainFile(contentType string, data []byte) file {
	return file{contentType: contentType, tag: tagOf(data), text: data, packed: pack(data)}
}

func packedFile(contentType string, data []byte) file {
	return file{contentType: contentType, tag: tagOf(data), packed: data}
}
