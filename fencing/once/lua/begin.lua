-- Claims an operation, or tells how it stands. KEYS[1] its record, a hash. ARGV[1] the run that claims.
-- Returns {state, run, since, payload}: since is in s of the server's clock. The run is ARGV[1] if it has the claim,
-- by this call or by an earlier copy of it.
local r = redis.call('HMGET', KEYS[1], 'state', 'run', 'since', 'payload')
if r[1] then return r end
local now = redis.call('TIME')[1]
redis.call('HSET', KEYS[1], 'state', 'running', 'run', ARGV[1], 'since', now, 'payload', '')
return {'running', ARGV[1], now, ''}
