"""The local web page: compare schedules and plan training runs.

serve          start the server on this machine and open the page (`zeropipe app`)
server         the routes of the HTTP interface
models         requests and answers of the interface, as pydantic models
guard, body    limits around every request: its host, its size, its JSON
errors         which field of a request an error belongs to, and its message
queues         which queue a request runs in: threads for small ones, worker processes for large ones
job_queue      one queue: waiting jobs and their runners
calls          the functions that requests run, with encoded answers
comparison     a request -> timelines, figures and the chart
downloads      a comparison as a file
uploads        files that the browser sent
thumbnails     a small picture of each schedule
plan_calls     the functions of the Plan page and of the search
plan_source    the model or the layer costs that a plan is for
static/        the page itself: main.js for Compare, plan.js for Plan
"""
