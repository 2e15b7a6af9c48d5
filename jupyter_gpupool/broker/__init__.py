# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The service around the pool: effects only, no decisions.

======================  ========================================================================
``app``                 the process: options, start in the right order, reload, end
``assembly``            every part, constructed in order of dependence
``configuration``       the configuration in force
``reload``              changes the configuration at SIGHUP and by the calendar; checks it
``timekeeper``          applies each change of the calendar once, on time
``shared``              limits that several machines share; loaded in a cluster only
``demand``              computes how much of shared limits sessions need; loaded in a cluster only
``cluster_views``       shows users the GPUs of all machines; loaded in a cluster only
``membership``          which group a user is in
``nss``                 looks up the machine's users and Unix groups, in threads
``core``                what all parts share: pool, sessions, journal, clock
``runner``              gives the pool an event, writes the journal, performs the actions
``sessions``            what the broker knows of each kernel besides the pool's record
``stirs``               tells readers of the status about changes without a row in the journal
``lifecycle``           ends sessions and their waits
``transport/auth``      the peer of a connection, and what that user may do
``transport/listener``  the socket's file, and accepting connections
``transport/usersockets``  one socket for each user whose kernels run in containers
``transport/connection``  bytes to messages and back, with limits
``transport/dispatch``  the order in which the requests of users are served
``request_fields``      the requests that the broker accepts, and the fields of each
``messages/router``     the table: message -> method
``messages/provisioner``  open, launched, retire, close
``messages/agent``      hello, hold, drop, cancel, yielded, resting
``messages/guard``      attach, grow, home, page, land; answers to threads that wait
``messages/people``     request, release, keep, status, why, hour, journal, watch, ping
``messages/admin``      recall, prioritise, end
``messages/relay``      passes requests of people and admins to the pool, and the answers back
``messages/elsewhere``  elsewhere; loaded in a cluster only
``messages/remote``     place, order, orders, perform, performed; loaded in a cluster only
``hosting``             kernels for servers on other machines; loaded in a cluster only
``messages/parsing``    reads the request in a message, and checks that its sender may make it
``messages/snapshot``   the answer to status
``messages/explanation``  the answer to why
``hour``                devices and queue in each minute of the last hour
``gpu/actions``         the pool's actions: attach, suspend, end
``gpu/landing``         moves a process that initialised CUDA on a GPU outside its slice
``gpu/landing_recovery``  lets processes run again that an earlier broker was moving
``gpu/monitor``         samples devices and host memory; gives the pool events
``gpu/samples``         keeps the last sample of the devices
``gpu/accounting``      learns overhead, overuse and the driver's own memory from samples
``gpu/health``          takes failed devices out of service, and tests them again later
``gpu/maintenance``     pause, drain, resume, retest
``gpu/setaside``        kernels without a slice, suspended for a pause
``gpu/refusals``        decides when a state is lost because the driver refuses to restore it
``pages/setup``         decides whether new kernels run under the guard; sets its variables
``pages/control``       copies the pool's records to the shared pages
``pages/translation``   translates the numbers of processes in containers
``pages/activity``      reads from the pages which sessions use devices; sets holds and time slices
``pages/hints``         writes home devices, and the room to grow, into the pages
``pages/quiesce``       waits until no thread is about to call the driver
``hostmemory``          host memory that a suspend may take
``pressure``            warns sessions and the pool when host memory becomes short
``store/journal``       SQLite: current records for a restart, rows for the reports
``store/journal_file``  which file is the journal, and whether this broker may use it
``store/history``       pages of the journal for clients, and trimming
``store/usage``         what users and groups have used, kept over restarts
``store/records``       records to JSON and back
``store/recovery``      rebuilds the pool after a kill, from the journal and the driver's state
``store/files``         the start record; restores files, and removes left-over files
``metrics``             switches ``figures`` on and off, and serves them
``ratelimit``           limits rows, log records and loop time of one user or one cause
``environment``         the driver that the broker uses, its files; the limit of open files
``wakeups``             makes Linux run the event loop sooner after a message
``supervisor``          sockets of systemd, and messages to it
``shutdown``            signals, and a shutdown in bounded time
======================  ========================================================================
"""
