-- Draws a fencing token; put before acquire.lua and queue.lua. F fence counter; floored: the token is no
-- lower than the server's clock in us, and the counter goes by itself 604800000 ms after the last one.
-- Returns nothing itself. mint returns the token, or nil and an error's text.
local function mint(F, floored)
  local n = redis.pcall('INCR', F)
  if type(n) == 'table' then return nil, n.err end
  local token = redis.call('GET', F) -- a number would lose what is above 2^53
  if not floored then
    redis.pcall('PERSIST', F) -- it may have been drawn from with a floor before
    return token
  end
  local t = redis.call('TIME')
  local clock = t[1] .. string.format('%06d', t[2])
  if tonumber(clock) > tonumber(token) then token = clock end
  local set = redis.pcall('SET', F, token, 'PX', 604800000)
  if set.err then return nil, set.err end
  return token
end
