package adminapi

import (
	"embed"
	"net/http"

	"github.com/stagemesh/stagemesh/gateway/front/transport"
)

// pagePath is the path of the page about models; its files are in the folder page.
const pagePath = "/page/"

//go:embed page
var page embed.FS

// contentPolicy allows the page nothing but this port.
const contentPolicy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// mountPage serves the page. It has no data: its scripts call the services.
func mountPage(mux *http.ServeMux) {
	files := http.FileServerFS(page)
	mux.Handle("GET "+pagePath, transport.WithStallTimeout(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Security-Policy", contentPolicy)
		w.Header().Set("Cache-Control", "no-cache")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		files.ServeHTTP(w, r)
	}), transport.DefaultStallTimeout))
}
