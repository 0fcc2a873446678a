// Package docs serves what there is to read of a gateway: /openapi.json, the
// document that describes it, and /docs, a page that shows the document and sends
// requests from it.
//
//	docs.Mount(mux, source, docs.Settings{})
//
// # The document
//
// A Source has it; it is sent with an entity tag and to be asked for again each time,
// packed for those who take that. What the source fails with is the answer, as
// gateway/front/failure has it.
//
// # The page
//
// The page is ours and small; the viewer in it is Swagger UI, whose files are in the
// folder viewer as update.sh has fetched and packed them, with their licences and a
// lock that a test holds them against. Everything comes from this port, and the
// page's Content-Security-Policy keeps it so: no inline script, no other host, in no
// frame.
//
// A browser gives no token when it opens a page, so Open, the page and its files, is
// for everybody; nothing in it is about the mesh. The document is for those who may
// call. Where the gateway wants a token, the page asks for it and keeps it in memory.
//
// # Concurrency
//
// Handlers are safe for concurrent use and start no goroutine. A caller that takes
// nothing of an answer for the Patience is cut off.
package docs
