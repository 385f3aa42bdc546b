-- Reads a mark. KEYS[1] mark. A script, because a plain read may be sent to a replica, which is behind.
-- Returns {1, token, owner}; token is '0' if there is none.
local m = redis.pcall('HMGET', KEYS[1], 'token', 'owner')
if m.err then return m end
return {1, m[1] or '0', m[2] or ''}
