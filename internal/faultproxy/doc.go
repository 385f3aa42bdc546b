// Package faultproxy puts faults between a Redis client and a Redis server.
//
// A [Proxy] listens on a local port, forwards to one server and understands
// the framing of RESP2 and RESP3 in both directions. It therefore knows which
// reply belongs to which request, also in pipelines, and can act on exactly one
// of them: lose it, hold it back, replace it, execute it twice, and so on. What
// to do is said with a [Rule]; switches such as [Proxy.Down], [Proxy.Hang] and
// [Proxy.DropReplies] act on everything that passes.
//
//	p := faultproxy.New(t, server.Addr())
//	h := p.Inject(faultproxy.Rule{
//		Match: faultproxy.Command("SET"),
//		Times: 1,
//		Do:    faultproxy.DropReply(),
//	})
//	// ... a client of p.Addr() sends SET and never hears of it ...
//	err := h.WaitTimeout(time.Second) // the server has executed it
//
// A request that was read from a client is on its way: if it is held or
// delayed, it still reaches the server after the client has given up and closed
// its connection. Only [Proxy.Close] throws such requests away. This is how the
// late execution of an abandoned request is imitated.
//
// A [Fake] is a server made of one function, for replies that no real server
// would give.
//
// Not understood are MONITOR, CLIENT REPLY OFF and SKIP (their replies cannot
// be counted by looking at the requests), and TLS.
package faultproxy
